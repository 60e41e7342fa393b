"""Write question_answering.json: answers of transformers' pipeline, which only versions before 5 have.

pip install "transformers==4.57.6"
PYTHONPATH=. python tests/goldens/question_answering.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForQuestionAnswering, PreTrainedTokenizerFast

GOLDEN = Path(__file__).with_suffix(".json")
POSITIONS = 40
CONTEXT = (
    "The river Aare rises in the Bernese Alps, flows through two lakes and the city of Bern, and meets the Rhine near "
    "Koblenz. It is the longest river that both rises and ends in Switzerland: 288 km! "
)
PAIRS = [
    ("Where does the Aare rise?", "The Aare rises in the Bernese Alps."),
    ("How long is it?", "It is 288 km long; the Rhine is longer."),
    ("Где она?", "Она в городе. Где же ещё?"),
    ("Où est la gare ?", "La gare est à côté du château."),
    ("谁?", "他在北京, 她在上海。"),
    ("x", "a"),
    ("Which lakes?", CONTEXT),
    ("How long is the Aare?", CONTEXT * 2),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 4},
    {"top_k": 3, "max_answer_len": 3},
    {"top_k": 3, "handle_impossible": True},
    {"top_k": 5, "max_seq_len": 32, "stride": 5},
    {"top_k": 4, "max_seq_len": 24, "stride": 1, "handle_impossible": True},
    {"top_k": 4, "align_to_words": False},
]
THEIRS = {"handle_impossible": "handle_impossible_answer", "stride": "doc_stride"}
"""Names of transformers' options where they differ."""


def wordpieces() -> PreTrainedTokenizerFast:
    """A tokenizer like BERT's, with some words; others are split into characters."""
    letters = sorted({letter for letter in "".join(map("".join, PAIRS)).lower() if not letter.isspace()})
    words = ["the", "river", "in", "is", "it", "long", "##er", "##est", "bern", "##ese", "lake", "##s", "rise", "где"]
    vocabulary: dict[str, int] = {}
    for token in (
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *words,
        *letters,
        *(f"##{letter}" for letter in letters),
    ):
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")},
    )


def model() -> BertForQuestionAnswering:
    """A model with random weights, far from uniform answers."""
    config = BertConfig(
        vocab_size=len(wordpieces()), max_position_embeddings=POSITIONS, hidden_size=24, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=20,
    )  # fmt: skip
    made = BertForQuestionAnswering(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(made.named_parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.6 if parameter.ndim > 1 else 0.5))
    return made


def main() -> None:
    """Write the file."""
    from transformers import pipeline

    answerer: Any = pipeline("question-answering", model(), tokenizer=wordpieces())
    found = []
    for options in OPTIONS:
        theirs = {THEIRS.get(name, name): value for name, value in options.items()}
        for question, context in PAIRS:
            answers = answerer(question=question, context=context, **theirs)
            found.append({"options": options, "pair": [question, context], "answers": answers})
    for row in found:
        answers = row["answers"] if isinstance(row["answers"], list) else [row["answers"]]
        row["answers"] = [{**answer, "score": round(answer["score"], 9)} for answer in answers]
    GOLDEN.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found), encoding="utf-8")


if __name__ == "__main__":
    main()
