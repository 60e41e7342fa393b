"""Models that once were verified although users get other results from them than from their graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result

INIT = "self.norm = nn.LayerNorm(c.hidden_size)\n\n    def forward(self, mels):"
HOOK = INIT.replace("\n\n", "\n        self.register_forward_hook(lambda module, inputs, output: 2 * output)\n\n")
CALL = INIT.replace("\n\n", "\n\n    def __call__(self, *inputs):\n        return 2 * super().__call__(*inputs)\n\n")
CALL = CALL.replace("*inputs", "*inputs, **named")


@pytest.mark.slow
@pytest.mark.parametrize("edited", [HOOK, CALL], ids=["hook", "call"])
def test_forward_is_called_through_the_model(
    build_small: Callable[..., None], zoo: Callable[..., Result], edited: str
) -> None:
    """A hook of the model and its own ``__call__`` change what users get, and are not in the graph of ``forward``."""
    build_small("sound-small", (INIT, edited))
    zoo("export", "model", "--onnx").failed(4, "not equal to the model", "nothing was written")


READ = "x = F.gelu(self.first(mels.transpose(1, 2)))"
INACCURATE = {
    "log sigmoid": ("F.logsigmoid(mels)", "mean 0 and deviation 100"),
    "cross entropy": (
        "F.binary_cross_entropy_with_logits(mels, torch.zeros_like(mels), reduction='none')",
        "mean 0 and deviation 100",
    ),
    "log of a sum": ("torch.logaddexp(mels, mels.flip(-1))", "mean 0 and deviation 100"),
    "log of sums": ("torch.logcumsumexp(mels, -1)", "mean 0 and deviation 100"),
}
"""Functions of the inputs whose ONNX graphs lose all digits or overflow, and where."""


def edited(mels: str) -> tuple[str, str]:
    """Return the edit that has the model read this function of its inputs."""
    return READ, f"mels = {mels}\n        {READ}"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("mels", "where"), INACCURATE.values(), ids=INACCURATE)
def test_inputs_of_other_magnitudes(
    build_small: Callable[..., None], zoo: Callable[..., Result], mels: str, where: str
) -> None:
    build_small("sound-small", edited(mels))
    zoo("export", "model", "--onnx").failed(4, "not equal to the model", f"inputs of {where}", "nothing was written")


PLACES = "torch.linspace(0, 1, 10) * (mels.shape[1] + 1)"
OWN = "mels.new_full((9,), 0.1).cumsum(0) * mels.shape[1]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "reason"), [(PLACES, "is off by"), (OWN, "in PyTorch itself at batch 1")], ids=["graph", "model"]
)
def test_rounded_sizes(build_small: Callable[..., None], zoo: Callable[..., Result], places: str, reason: str) -> None:
    """Where a product is a whole number, the graph, or PyTorch in float32 alone, may round it to the one before."""
    picked = f"mels[:, ({places}).long().clamp(max=mels.shape[1] - 1)]"
    build_small("sound-small", edited(f"{picked}.mean(1, keepdim=True) + mels"))
    line = zoo("export", "model", "--onnx").failed(4, "not equal to the model", reason, "nothing was written")
    (length,) = re.findall(r"batch 1, length (\d+),", line)
    assert int(length) % 5 == 0


MASK = "mask = build_mask(length, total, padding=attention_mask, causal=True)  # (B, 1, T, S)"
EMBED = "x = self.embedding(input_ids)\n        rotation"
NORM = "x = self.norm(x)\n        tokens ="
LONG = {
    "blocks of 32 absolute places": (
        "decoder-small",
        (
            MASK,
            f"{MASK}\n        block = torch.arange(total) // 32\n        mask &= block[-length:, None] == block",
        ),
        "padding on the left",
    ),
    "64 tokens of a batch": (
        "encoder-small",
        (NORM, f"x = x * (torch.arange(x[..., 0].numel()).view(x[..., :1].shape) < 64).to(x.dtype)\n        {NORM}"),
        "alone as in a batch",
    ),
    "40 places for each token id": (
        "decoder-small",
        (
            EMBED,
            "alike = (input_ids.unsqueeze(2) == input_ids.unsqueeze(1)) & mask[:, 0, :, -length:]  # (B, T, T)\n"
            "        x = self.embedding(input_ids) * (alike.sum(2, keepdim=True) <= 40)\n        rotation",
        ),
        "equal tokens",
    ),
}
"""Contradictions that only long texts show, or long texts of few tokens: the model, the edit, and the law."""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("model", "edit", "law"), LONG.values(), ids=LONG)
def test_laws_are_checked_at_long_texts(
    build_small: Callable[..., None], zoo: Callable[..., Result], model: str, edit: tuple[str, str], law: str
) -> None:
    build_small(model, edit)
    zoo("export", "model", "--onnx").failed(4, law)


@pytest.mark.slow
def test_sign_of_a_zero_among_the_inputs(build_small: Callable[..., None], zoo: Callable[..., Result]) -> None:
    """ONNX defines no ``atan2``: the usual expression for it ignores the sign of a zero."""
    build_small("sound-small", edited("torch.atan2(mels, -mels.flip(-1))"))
    zoo("export", "model", "--onnx").failed(4, "not equal to the model", "nothing was written")


@pytest.mark.slow
def test_compiled_module(build_small: Callable[..., None], zoo: Callable[..., Result]) -> None:
    """torch's compiler advises on stderr how to run a module at so many sizes and dtypes."""
    build_small("decoder-small", ("self.mlp = MLP(c)", 'self.mlp = torch.compile(MLP(c), backend="eager")'))
    result = zoo("export", "model", "--onnx")
    assert result.status == 0
    (note,) = result.err.splitlines()
    assert "exported without functions: a module is wrapped in torch.compile, which no function can contain" in note


@pytest.mark.slow
def test_unaligned_weights(build_small: Callable[..., None], zoo: Callable[..., Result]) -> None:
    """The header of a safetensors file may have any length."""
    build_small("decoder-small")
    assert zoo("export", "model", "--onnx").status == 0
    file = Path("model/model.safetensors")
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes((end - 8 + 3).to_bytes(8, "little") + data[8:end] + b"   " + data[end:])
    assert zoo("relink", "model").status == 0
    assert zoo("verify", "model").status == 0


LAST = "return self.norm(F.gelu(self.second(x)).transpose(1, 2))"
MODES = {
    "dtype": ("1 + 0.005 * (x.dtype == torch.float64)", "dtype-invariance"),
    "number for a dtype": ("{torch.float64: 1.0}.get(mels.dtype, 1.02)", "dtype-invariance"),
    "error for a dtype": ("{torch.float64: 1.0}[mels.dtype]", "dtype-invariance"),
    "bytes of a number": ("1 + x.element_size() / 1000", "dtype-invariance"),
    "bytes of a tensor": ("1 + 0.005 * (self.norm.weight.nbytes == 64)", "dtype-invariance"),
    "type of a weight": ("1 + 0.005 * (self.norm.weight.type() == 'torch.FloatTensor')", "dtype-invariance"),
    "wider dtype": ("1 + 0.005 * (x.double().dtype != x.dtype)", "dtype-invariance"),
    "wider dtype of complex numbers": (
        "1 + 0.005 * (torch.fft.rfft(mels).dtype == torch.complex64)",
        "dtype-invariance",
    ),
    "kept from an earlier call": (
        "self.__dict__.setdefault('factor', 1 + 0.005 * (x.dtype == torch.float64))",
        "dtype-invariance",
    ),
    "dtype and gradients": (
        "1 + 0.005 * (x.dtype == torch.float32 and torch.is_grad_enabled())",
        "dtype-invariance",
    ),
    "gradients of a weight": ("1 + 0.005 * self.norm.weight.requires_grad", "grad-invariance"),
    "gradients of one weight": (
        "1 + 0.005 * (self.norm.weight.requires_grad and not self.second.weight.requires_grad)",
        "grad-invariance",
    ),
    "gradients": ("1 + 0.005 * torch.is_grad_enabled()", "grad-invariance"),
    "gradients of numbers": ("1 + 0.005 * x.requires_grad", "grad-invariance"),
    "gradients of inputs": ("1 + 0.005 * mels.requires_grad", "grad-invariance"),
    "no gradients at all": (
        "1 + 0.005 * (not torch.is_grad_enabled() and not self.norm.weight.requires_grad)",
        "grad-invariance",
    ),
    "mean of many rows": ("1 + 0.1 * (torch.is_grad_enabled() and len(x) > 4) * mels.mean()", "grad-invariance"),
    "inference mode": ("1 + 0.005 * torch.is_inference_mode_enabled()", "grad-invariance"),
    "both": ("1 + 0.005 * (x.dtype == torch.float64) * torch.is_inference_mode_enabled()", "dtype-invariance"),
}
"""Factors that depend on how the model is called, not on what it is called with."""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("factor", "law"), MODES.values(), ids=MODES)
def test_same_function_however_the_model_is_called(
    build_small: Callable[..., None], zoo: Callable[..., Result], factor: str, law: str
) -> None:
    """The reference would be another model than the one that users call, and its difference count as rounding."""
    build_small("sound-small", (LAST, f"{LAST} * ({factor})"))
    zoo("export", "model", "--onnx").failed(4, f"violates the law {law}")
    assert not list(Path("model").glob("*.onnx"))


@pytest.mark.slow
def test_padding_that_counts_where_gradients_are_recorded(
    build_small: Callable[..., None], zoo: Callable[..., Result]
) -> None:
    other = "mask = build_mask(length, total, padding=None if torch.is_grad_enabled() else attention_mask, causal=True)"
    build_small("decoder-small", (MASK, other))
    zoo("export", "model", "--onnx").failed(4, "violates the law grad-invariance")


HONEST = {
    "angles in two dtypes": (
        "x = x + (torch.arange(x.shape[2], dtype=torch.float32) / 7).sin().to(x.dtype)"
        " + (torch.arange(x.shape[2], dtype=x.dtype) / 7).cos()"
    ),
    "epsilon": "x = x + torch.log(x.sigmoid() + torch.finfo(x.dtype).eps)",
    "tiny of a wider softmax": "p = F.softmax(x, 1, dtype=torch.float32)\n        "
    "x = x + torch.log(p.clamp(min=torch.finfo(p.dtype).tiny)).to(x.dtype)",
    "double": "x = x + torch.log(x.double().softmax(1) + torch.finfo(torch.float64).eps).to(x.dtype)",
    "a clamp of float16": "x = x.clamp(-9, 9) if x.dtype == torch.float16 else x",
    "views changed in place": "a, b = x.chunk(2, 1)\n        a *= 0.5\n        x = torch.cat((a, b), 1)",
}
"""Code of published models that looks at dtypes, or that has no gradients."""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("code", HONEST.values(), ids=HONEST)
def test_honest_code_obeys_the_laws(build_small: Callable[..., None], code: str) -> None:
    from zoo.artifact import ModelDirectory
    from zoo_export.parity.laws import check_laws

    build_small("sound-small", (LAST, f"{code}\n        {LAST}"))
    laws = check_laws(ModelDirectory.open(Path("model")))
    assert (laws["dtype-invariance"], laws["grad-invariance"]) == ("passed", "passed")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 8])
def test_one_number_of_rows(build_small: Callable[..., None], zoo: Callable[..., Result], rows: int) -> None:
    """Rows are normalised together where a batch has one size, which no other check uses."""
    together = f"(1 + 0.1 * (type(len(x)) is int and len(x) == {rows}))"
    build_small("sound-small", (LAST, f"{LAST} * {together}"))
    zoo("export", "model", "--onnx").failed(4, "law batch-invariance", f"the first {rows} of 9 rows")
