"""A tokenizer for Triton's Python backend: texts (batch, 1) to the padded inputs of a model, each (batch, tokens).

Triton loads this file from a model repository. It needs the package ``tokenizers`` in Triton's Python, and nothing of
zoo. ``inputs.json`` beside it describes the inputs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton
from tokenizers import Tokenizer


class TritonPythonModel:
    """The interface that Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the tokenizer and the settings."""
        folder = Path(args["model_repository"]) / args["model_version"]
        self.settings = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        if self.settings["truncate"] is not None:
            self.tokenizer.enable_truncation(self.settings["truncate"])
        self.outputs = [item["name"] for item in json.loads(args["model_config"])["output"]]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer each request by itself: shorter texts of a request are padded to its longest one."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        texts = triton.get_input_tensor_by_name(request, "text").as_numpy().reshape(-1)
        rows = self.tokenizer.encode_batch([text.decode("utf-8") for text in texts])
        longest, limit = max(len(row.ids) for row in rows), self.settings["positions"]
        if limit is not None and longest > limit:
            error = triton.TritonError(f"{longest} tokens exceed the model's {limit} positions")
            return triton.InferenceResponse(error=error)
        if not all(row.ids for row in rows):
            return triton.InferenceResponse(error=triton.TritonError("a text has no tokens"))
        ids = self._padded([row.ids for row in rows], self.settings["pad_id"])
        mask = self._padded([[1] * len(row.ids) for row in rows])
        tensors = {"position_ids": np.maximum(mask.cumsum(1) - 1, 0), self.settings["ids"]: ids}
        tensors["token_type_ids"] = self._padded([row.type_ids for row in rows]) * (self.settings["segments"] > 1)
        tensors |= dict.fromkeys(self.settings["masks"], mask)
        return triton.InferenceResponse([triton.Tensor(name, tensors[name]) for name in self.outputs])

    def _padded(self, rows: Sequence[Sequence[int]], fill: int = 0) -> np.ndarray[Any, Any]:
        length = max(self.settings["length"] or 0, *map(len, rows))
        result = np.full((len(rows), length), fill, np.int64)
        for number, row in enumerate(rows):
            place = slice(length - len(row), None) if self.settings["side"] == "left" else slice(len(row))
            result[number, place] = row
        return result
