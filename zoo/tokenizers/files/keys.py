"""The keys of tokenizer_config.json: which are applied, which change nothing, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zoo.errors import UsageError

__all__ = ["SETTINGS", "Setting", "check_keys"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What zoo does with a key."""

    status: Literal["applied", "inert", "refused"]
    reason: str
    harmless: tuple[Any, ...] = (None, False)
    """Values of a refused key that change nothing."""


def _all(status: Literal["applied", "inert", "refused"], reason: str, keys: str) -> dict[str, Setting]:
    return dict.fromkeys(keys.split(), Setting(status, reason))


_NAMED = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token"
SETTINGS: Mapping[str, Setting] = {
    **_all("applied", "special tokens, with their flags", _NAMED),
    **_all(
        "applied",
        "further tokens, with their flags",
        "added_tokens_decoder additional_special_tokens extra_special_tokens model_specific_special_tokens",
    ),
    **_all("applied", "chooses how the other files are read", "tokenizer_class"),
    **_all("applied", "letters, in the classes that read them", "do_lower_case strip_accents tokenize_chinese_chars"),
    **_all("applied", "letters, in the classes that read them", "keep_accents"),
    **_all("applied", "punctuation, which DeBERTa-v2's class sets apart", "split_by_punct"),
    **_all("applied", "spaces, in the classes that read them", "add_prefix_space legacy trim_offsets"),
    **_all("applied", "number of T5's sentinel tokens", "extra_ids"),
    **_all(
        "applied",
        "the token between words, and the character that is written for it, in speech recognition by CTC",
        "word_delimiter_token replace_word_delimiter_char",
    ),
    **_all(
        "applied",
        "spaces removed from decoded texts, of BPE only with the second",
        "clean_up_tokenization_spaces clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
    ),
    **_all("applied", "prompts of chats", "chat_template"),
    **_all("applied", "the length for `truncate`, the second if there is no first", "model_max_length max_len"),
    **_all(
        "applied",
        "languages and vocabularies, where a SentencePiece model is converted",
        "src_lang language_codes separate_vocabs",
    ),
    **_all("inert", "beside a tokenizer.json, transformers ignores it", "add_bos_token add_eos_token"),
    **_all("inert", "padding is masked, and zoo pads on the side that the model reads", "padding_side"),
    **_all("inert", "padding is masked", "pad_token_type_id pad_to_multiple_of"),
    **_all(
        "inert",
        "zoo truncates only on request: generation loses the first tokens, other tasks the last",
        "truncation_side max_length stride truncation_strategy",
    ),
    **_all(
        "applied",
        "without token_type_ids in it, both texts of a pair have the type 0; if it is absent, the class determines it",
        "model_input_names",
    ),
    **_all(
        "inert",
        "names files, which are found by their usual names",
        "tokenizer_file vocab_file merges_file special_tokens_map_file source_spm target_spm spm_file "
        "target_vocab_file normalizer_file",
    ),
    **_all(
        "inert",
        "a record of how the files were written or loaded",
        "name_or_path processor_class backend files_loaded is_local local_files_only device_map use_fast verbose "
        "slow_tokenizer_class tokenizer_type init_inputs _commit_hash revision subfolder token trust_remote_code "
        "code_revision cache_dir force_download proxies config gguf_file mistral_format _from_auto _from_pipeline",
    ),
    **_all(
        "inert",
        "an argument of calls or of training, not of what is stored",
        "add_generation_prompt commit_message repo_id save_jinja_files sanitize_control_tokens max_target_length "
        "use_source_tokenizer initial_alphabet continuing_subword_prefix end_of_word_suffix",
    ),
    **_all("inert", "PEGASUS's tokens for pretraining, which tokenizer.json states", "mask_token_sent offset"),
    **_all(
        "inert",
        "tokenizer.json states it",
        "vocab merges unk_id post_processor tokenizer tokenizer_object tokenizer_padding tokenizer_truncation "
        "_json_padding _json_truncation _spm_precompiled_charsmap sp_model_kwargs",
    ),
    **_all("inert", "bytes that are not UTF-8 become U+FFFD", "errors"),
    **_all("inert", "reads answers of chats, which zoo returns as text", "response_template response_schema"),
    **_all("inert", "transformers sanitizes chats only on request", "chat_control_tokens"),
    **_all("inert", "the chat template states it", "use_default_system_prompt"),
    **_all(
        "inert",
        "the language of targets and the task are options of a run",
        "tgt_lang source_lang target_lang language task predict_timestamps num_madeup_words",
    ),
    **_all("inert", "the post-processor of tokenizer.json states it", "legacy_behaviour"),
    "split_special_tokens": Setting("refused", "special tokens would be read as letters"),
    "fix_mistral_regex": Setting("refused", "transformers would replace the pre-tokenizer"),
    "fast_tokenizer_files": Setting(
        "refused", "transformers would choose another file", (None, [], ["tokenizer.json"])
    ),
    "auto_map": Setting("refused", "for a class that zoo does not know: code of the checkpoint is not run", (None,)),
}
"""The keys that transformers reads. Keys that end in ``_token`` are special tokens too. It keeps other keys without
reading them, so that they are inert, unless the class is one that zoo does not rebuild: then they are refused."""


def check_keys(settings: Mapping[str, Any], name: str, where: object, *, known: bool) -> None:
    """Raise :class:`UsageError` for a setting that zoo cannot apply.

    Args:
        settings: the content of tokenizer_config.json.
        name: the class that reads it.
        where: its path.
        known: whether zoo knows what the class reads.
    """
    for key, value in settings.items():
        setting = SETTINGS.get(key)
        if key == "auto_map" and (known or "AutoTokenizer" not in value):
            continue
        if setting is not None and setting.status == "refused" and value not in setting.harmless:
            raise UsageError(f"{key} {value!r:.80} is not supported ({setting.reason})", where, f"remove {key}")
        if setting is None and not known and not key.endswith("_token") and value is not None:
            problem = f"{key} {value!r:.80} is not supported: {name} may read it"
            raise UsageError(problem, where, f"remove {key} if it changes nothing")
