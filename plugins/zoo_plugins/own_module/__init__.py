"""Modules of a user's own code, which a factory builds: see ``zoo_export.export_module``."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="own-module",
            tasks=("tensors",),
            config="zoo_plugins.own_module.config:OwnModuleConfig",
            model="zoo_plugins.own_module.model:OwnModule",
            reference="the user's own code",
            own_modules=True,
            expected_failures={"signature": "inputs are passed on to the module, under whatever names it has"},
        )
    ]
