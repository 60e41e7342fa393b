"""Numbering of the tokens of mBART and mBART-50, whose files hold a SentencePiece model only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo import UsageError
from zoo.checkpoints import FAIRSEQ_TOKENS, PieceTokens

__all__ = ["mbart50_tokens", "mbart_tokens"]

_LANGUAGES = (
    "ar_AR", "cs_CZ", "de_DE", "en_XX", "es_XX", "et_EE", "fi_FI", "fr_XX", "gu_IN", "hi_IN", "it_IT", "ja_XX", "kk_KZ",
    "ko_KR", "lt_LT", "lv_LV", "my_MM", "ne_NP", "nl_XX", "ro_RO", "ru_RU", "si_LK", "tr_TR", "vi_VN", "zh_CN",
)  # fmt: skip
"""The languages of mBART in the order of their tokens (Liu et al. 2020)."""
_MORE_LANGUAGES = (
    "af_ZA", "az_AZ", "bn_IN", "fa_IR", "he_IL", "hr_HR", "id_ID", "ka_GE", "km_KH", "mk_MK", "ml_IN", "mn_MN", "mr_IN",
    "pl_PL", "ps_AF", "pt_XX", "sv_SE", "sw_KE", "ta_IN", "te_IN", "th_TH", "tl_XX", "uk_UA", "ur_PK", "xh_ZA", "gl_ES",
    "sl_SI",
)  # fmt: skip
"""The languages that mBART-50 adds (Tang et al. 2020)."""


def mbart_tokens(
    settings: Mapping[str, Any], languages: Sequence[str] = _LANGUAGES, around: str = "{} </s> {language}"
) -> PieceTokens:
    """Return the numbering of tokens, and the language of a text among those around it."""
    language = settings.get("src_lang") or "en_XX"
    if language not in languages:
        raise UsageError(f"src_lang {language!r} is not a language of this family", "tokenizer_config.json")
    return PieceTokens(
        **FAIRSEQ_TOKENS,
        last=(*languages, "<mask>"),
        single=around.format("$A", language=language),
        pair=around.format("$A $B", language=language),
    )


def mbart50_tokens(settings: Mapping[str, Any]) -> PieceTokens:
    """Return the numbering of mBART-50, which puts the language before a text."""
    return mbart_tokens(settings, _LANGUAGES + _MORE_LANGUAGES, "{language} {} </s>")
