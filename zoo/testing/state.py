"""The check that a plugin does not change global state."""

from __future__ import annotations

import importlib
import locale
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from zoo.plugins import isolation
from zoo.testing.check import fail
from zoo.testing.subject import Subject

__all__ = ["global_state", "observe"]

_SECONDS = 600.0
_ENVIRONMENT = dict(os.environ)
"""The environment before a check imported any plugin. Child processes would inherit later changes."""


def global_state(subject: Subject) -> None:
    """Importing, building, running and training the model does not change global state of the process.

    Global state is torch's threads, default dtype and device, flags, grad mode and generator; the contents of
    ``torch``, ``torch.nn``, ``nn.functional``, ``Tensor`` and ``nn.Module``; the generators of ``random`` and numpy;
    environment variables, the working directory, ``sys.path``, warning filters and the locale. If a plugin changed it,
    models of other plugins would give other results, which is hard to trace. Training may use torch's generator.

    Change such state only temporarily, in a context manager, or leave it to the caller.
    """
    architecture = subject.spec.architecture
    request = {
        "modules": [subject.plugin.module.partition(":")[0], architecture.config.partition(":")[0]],
        "config": architecture.config,
        "model": architecture.model,
        "values": subject.spec.config.to_dict(),
        "environment": _ENVIRONMENT,
    }
    expected = "the process's global state does not change"
    for outcome in isolation.run("zoo.testing.state:observe", {"all": request}, seconds=_SECONDS):
        if outcome.failure is not None:
            fail(expected, outcome.failure)
        if outcome.value:
            fail(expected, outcome.value)


def observe(_: str, request: Mapping[str, Any]) -> str | None:
    """Go through all stages, and return the first change of global state with its stage, or None."""
    import numpy as np
    import torch

    from zoo.contract import Graph
    from zoo.probe.grid import longest_length
    from zoo.probe.inputs import Point, make_feeds
    from zoo.testing.compute import Gradients, run

    def stages() -> Iterator[str]:
        for module in request["modules"]:
            importlib.import_module(module)
        yield "importing the plugin and its configuration"
        config_class, model_class = (_load(request[key]) for key in ("config", "model"))
        yield "importing the model"
        config = config_class.from_dict(request["values"])
        graphs: tuple[Graph, ...] = tuple(config.graphs())
        with torch.random.fork_rng(devices=[]):
            model = model_class(config).eval()
        yield "building the model"
        longest = longest_length(config, graphs)
        feeds = make_feeds(graphs, Point(2, min(5, longest), 0, "none"), 0, longest)
        with torch.no_grad():
            run(Gradients(model), graphs, feeds)
        yield "running the model"
        model.train()
        optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=1e-3)
        with torch.random.fork_rng(devices=[]):
            outputs = [item for results in run(Gradients(model), graphs, feeds).values() for item in results.values()]
            torch.stack([item.sum() for item in outputs if item.requires_grad]).sum().backward()
        optimizer.step()
        yield "training the model"

    # Warm up: torch initialises some of its state on first use.
    torch.nn.functional.scaled_dot_product_attention(
        *(torch.ones(1, 1, 2, 2, requires_grad=True),) * 3
    ).sum().backward()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    optimizer.step()
    np.random.seed(0)
    random.seed(0)
    os.environ.clear()
    os.environ.update(request["environment"])
    before = dict(_snapshot())
    for stage in stages():
        after = dict(_snapshot())
        for name, value in before.items():
            if after.get(name) != value:
                return f"{stage} changes {name}"
        for name in after.keys() - before.keys():
            return f"{stage} adds {name}"
    return None


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _snapshot() -> Iterator[tuple[str, Any]]:
    """Yield descriptions and comparable values of all global state."""
    import numpy as np
    import torch

    yield "the number of torch's threads", (torch.get_num_threads(), torch.get_num_interop_threads())
    yield "torch's default dtype", torch.get_default_dtype()
    yield "torch's default device", torch.get_default_device()
    yield "torch's grad mode", (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    yield "torch's autocast", (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    yield "torch's anomaly mode", torch.is_anomaly_enabled()
    yield (
        "torch's deterministic algorithms",
        (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
    )
    yield "torch's precision of float32 products", torch.get_float32_matmul_precision()
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    yield "the flags of torch.backends", (
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.backends.mkldnn.enabled,
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
    )  # fmt: skip
    yield "torch's generator", torch.random.get_rng_state().numpy().tobytes()
    yield "numpy's generator", repr(np.random.get_state())
    yield "the generator of random", random.getstate()
    yield "numpy's handling of errors", (tuple(np.geterr().items()), tuple(np.get_printoptions().items()))
    for name, owner in (
        ("torch", torch),
        ("torch.nn", torch.nn),
        ("torch.nn.functional", torch.nn.functional),
        ("torch.nn.init", torch.nn.init),
        ("torch.Tensor", torch.Tensor),
        ("torch.nn.Module", torch.nn.Module),
        ("torch.nn.Linear", torch.nn.Linear),
    ):
        for key, value in list(vars(owner).items()):
            if not isinstance(value, ModuleType) and not (key.startswith("_") and not callable(value)):
                yield f"{name}.{key}", id(value)
    yield from ((f"the environment variable {name}", value) for name, value in os.environ.items())
    yield "the working directory", str(Path.cwd())
    yield "sys.path", tuple(sys.path)
    yield "the warning filters", tuple(map(str, warnings.filters))
    yield "the locale", tuple(locale.setlocale(kind) for kind in (locale.LC_CTYPE, locale.LC_NUMERIC, locale.LC_TIME))
    yield "the recursion limit", sys.getrecursionlimit()
    yield "hooks of sys", (id(sys.excepthook), id(sys.displayhook), id(threading.excepthook), id(sys.stdout))
