"""Running graphs on OpenVINO, an optional package. Only this package imports it."""
