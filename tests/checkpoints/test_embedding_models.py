"""Directories of published embedding models (BGE, E5, GTE): their files and settings, with small random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close

import zoo as library
from zoo.checkpoints import export_checkpoint, import_checkpoint

_BERT = {
    "attention_probs_dropout_prob": 0.1, "classifier_dropout": None, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 30, "initializer_range": 0.02,
    "intermediate_size": 37, "layer_norm_eps": 1e-12, "max_position_embeddings": 40, "num_attention_heads": 5,
    "num_hidden_layers": 2, "pad_token_id": 0, "position_embedding_type": "absolute", "torch_dtype": "float32",
    "type_vocab_size": 2, "use_cache": True, "vocab_size": 61,
}  # fmt: skip
_XLMR = {
    **_BERT, "bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-5, "output_past": True, "pad_token_id": 1,
    "type_vocab_size": 1,
}  # fmt: skip
# The class and config.json, pooling, whether vectors are normalised, and prompts.
MODELS: dict[str, tuple[str, dict[str, Any], str, bool, dict[str, str]]] = {
    "bge-base-en-v1.5": ("Bert", {**_BERT, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}, "cls", True, {}),
    "e5-base-v2": ("Bert", _BERT, "mean", True, {"query": "query: ", "passage": "passage: "}),
    "gte-base": ("Bert", {**_BERT, "torch_dtype": "float16"}, "mean", True, {}),
    "multilingual-e5-base": ("XLMRoberta", _XLMR, "mean", True, {"query": "query: "}),
    "bge-m3": ("XLMRoberta", {**_XLMR, "_name_or_path": ""}, "cls", True, {}),
    "all-mpnet-style": ("XLMRoberta", _XLMR, "mean", False, {}),
}


def write(folder: Path, name: str) -> transformers.PreTrainedModel:
    """Write the files of a directory as sentence-transformers does, and return transformers' model."""
    kind, config, pooling, normalised, prompts = MODELS[name]
    cls = getattr(transformers, f"{kind}Model")
    theirs = cls(cls.config_class(**config)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(folder)
    family = {"Bert": "bert", "XLMRoberta": "xlm-roberta"}[kind]
    modules = ["", "1_Pooling", *(["2_Normalize"] if normalised else [])]
    files = {
        "config.json": {**config, "architectures": [f"{kind}Model"], "model_type": family},
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{module}"}
            for number, (path, module) in enumerate(zip(modules, ("Transformer", "Pooling", "Normalize"), strict=False))
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": 30,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
        "sentence_bert_config.json": {"max_seq_length": 38, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "3.0.0", "transformers": "4.40.0", "pytorch": "2.1.0"},
            "prompts": prompts,
            "default_prompt_name": None,
        },
    }
    (folder / "1_Pooling").mkdir()
    for path, content in files.items():
        (folder / path).write_text(json.dumps(content))
    return theirs


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", MODELS)
def test_embeddings_equal_transformers(tmp_path: Path, name: str) -> None:
    """Vectors are the pooled states of transformers' model, and the directory is written back as it was."""
    _, config, pooling, normalised, _ = MODELS[name]
    theirs = write(tmp_path / "hub", name)
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    found = imported.spec.config
    assert (found.task, found.pooling, found.normalize) == ("sentence-embedding", pooling, normalised)
    ids = torch.randint(3, 61, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [1]])).long()
    ids = ids.masked_fill(mask == 0, config["pad_token_id"])
    with torch.inference_mode():
        states = theirs.double()(ids, attention_mask=mask).last_hidden_state
        vectors = library.load(tmp_path / "ours").double()(ids, mask)["sentence_embedding"]
    rows = [
        row[:length].mean(0) if pooling == "mean" else row[0] for row, length in zip(states, (12, 7, 1), strict=True)
    ]
    wanted = torch.stack([row / row.norm() if normalised else row for row in rows])
    assert_close(vectors, wanted, rtol=0, atol=1e-10)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)
    for path in ("modules.json", "1_Pooling/config.json"):
        before, after = (json.loads((tmp_path / place / path).read_text()) for place in ("hub", "back"))
        assert after == before if path == "modules.json" else before.items() <= after.items()
