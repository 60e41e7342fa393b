"""The built-in architectures, each written exactly as a third party would."""
