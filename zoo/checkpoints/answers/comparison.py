"""Comparison of an import with the original from text to answer: tokens, chats, vectors of texts, and classes.

What zoo answers is computed from the files that the import writes, and from the model in float64. The original is the
tokenizer and the pipeline of transformers, or the model of sentence-transformers. No code of a checkpoint is run.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.artifact import CHAT_TEMPLATE, TARGET_TOKENIZER, TOKENIZER, ModelDirectory
from zoo.artifact.prefixes import read_prefixes
from zoo.checkpoints.answers.found import ComparedAnswers
from zoo.checkpoints.answers.image_texts import compare_chats, compare_prompts
from zoo.checkpoints.answers.images import DENSE, ImageComparison
from zoo.checkpoints.answers.labels import compare_labels
from zoo.checkpoints.answers.pipelines import FUNCTIONS, REMEDY, Answers, ask_exactly, close, scores_of, shown
from zoo.checkpoints.answers.sounds import SoundComparison
from zoo.checkpoints.answers.tokens import TokenComparison, ask
from zoo.checkpoints.layout import Layout
from zoo.checkpoints.original import Unavailable, call, quiet, require_memory
from zoo.checkpoints.sentences import applies_activation, lowers_texts
from zoo.checkpoints.source import Checkpoint
from zoo.classes import ClassifierConfig
from zoo.contract import standard_fields
from zoo.errors import ArtifactError, ParityError, UsageError
from zoo.registry import ModelSpec
from zoo.tokenizers.files.load import read_tokenizer
from zoo.tokenizers.inputs import TextInputs
from zoo.tokenizers.long_texts.truncation import text_limit
from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["AnswerComparison", "ComparedAnswers"]

_TEXTS = ("The rain has stopped by now.", "tea", "Où est-il ? 🙂", "  two  spaces  ", "A b C, D.")
_PAIRS = (("The rain has stopped.", "tea"), ("a", "B c D"))
_PROMPTS = 4
"""Maximum number of prompts by name with which texts are encoded."""
_CHOICES = (
    ("The rain has stopped.", ("tea", "We go out by now, without umbrellas.", "Où est-il ?")),
    ("a", ("A b C, D.", "tea")),
)
_PAIR_TASKS = ("text-classification", "question-answering", "multiple-choice", "pretraining")
_DECODED = ("text-generation", "text2text-generation", "image-to-text", "image-text-to-text", "speech-recognition")


class AnswerComparison:
    """Compares the answers of an import, stage by stage, and collects what was compared.

    Args:
        stage: the folder with the files that the import wrote.
        description: the content of the config.json to be written.
        spec: the model, with the task of the checkpoint.
        checkpoint: the checkpoint.
        layout: its layout.
        verify: True to raise if something cannot be compared, False to compare nothing.
        dropped: added tokens that the user left out.
    """

    def __init__(
        self,
        stage: Path,
        description: Mapping[str, Any],
        spec: ModelSpec,
        checkpoint: Checkpoint,
        layout: Layout,
        verify: bool | None,
        dropped: Collection[str] = (),
    ) -> None:
        self.spec = spec
        self.checkpoint = checkpoint
        self.layout = layout
        self.verify = verify
        self.dropped = dropped
        files: dict[str, Mapping[str, Any]] = {path.name: {} for path in stage.iterdir()}
        self.stored = ModelDirectory(stage, files, {**description, "task": spec.task, "config": spec.config.to_dict()})
        self.found = ComparedAnswers()
        self._images = ImageComparison.of(spec, checkpoint, layout)
        self._sounds = SoundComparison.of(spec, checkpoint)
        self._answers = Answers(spec.config, checkpoint, self.stored.dtype)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """The tokenizer that was written, which does not truncate."""
        path, target = self.stored.path, None
        if TARGET_TOKENIZER in self.stored.files:
            target = Tokenizer(read_tokenizer(path / TARGET_TOKENIZER))
        inputs = TextInputs(self.spec.graphs, self.spec.config, path)
        return Tokenizer(read_tokenizer(path / TOKENIZER), inputs, target=target)

    @cached_property
    def _limit(self) -> int | None:
        """The number of tokens to which zoo truncates texts by default."""
        return text_limit(self.stored, None)

    @cached_property
    def _original(self) -> Any:
        """The original tokenizer. Raises :class:`Unavailable` or ``ImportError``."""
        if importlib.util.find_spec("transformers") is None:
            raise Unavailable("transformers is not installed")
        import transformers

        try:
            loaded = transformers.AutoTokenizer.from_pretrained(
                self.checkpoint.path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # another library may raise anything for an unknown file
            raise Unavailable(f"the original cannot load it: {_line(error)}") from error
        self._name(transformers)
        return loaded

    def _name(self, library: Any) -> None:
        name = f"{library.__name__.replace('_', '-')} {library.__version__}"
        if name not in self.found.against:
            self.found.against.append(name)

    def _attempt(self, kind: str, compare: Callable[[], int | str]) -> None:
        """Record the number of inputs that a function compared, or why it could not.

        Raises :class:`UsageError` if the comparison is wanted, but not possible.
        """
        if self.verify is False:
            self.found.reasons = {"answers": "disabled"}
            return
        try:
            with quiet():
                count = compare()
        except (ImportError, Unavailable) as reason:
            if self.verify:
                problem = f"{kind} cannot be compared with the original: {reason}"
                raise UsageError(problem, self.checkpoint.where) from reason
            count = str(reason)
        if isinstance(count, str):
            self.found.reasons[kind] = count
        else:
            self.found.counts[kind] = count

    def compare_inputs(self) -> None:
        """Compare what needs no model: images, sound and tokens. Raises :class:`ParityError` for a difference."""
        if self._images is not None and self._images.obstacle is not None:
            self.found.reasons["images"] = self._images.obstacle
        elif self._images is not None:
            self._attempt("images to pixels", self._pixels)
        if self._sounds is not None:
            self._compare_sounds(self._sounds)
            return
        if TOKENIZER not in self.stored.files:
            self.found.reasons |= {} if self._images is not None else {"answers": "the model has no tokenizer"}
            return

        def texts() -> int | str:
            return self._tokens.compare_ids(pairs=self.spec.task in _PAIR_TASKS, limit=self._limit)

        self._attempt("texts to token ids", texts)
        if "texts to token ids" not in self.found.counts:
            return
        left, every = len(self._tokens.tokens), len(self._tokens.all_tokens)
        if left < every:
            self.found.reasons["added tokens"] = f"{every - left} of {every}, beyond a sample"
        if self._tokens.lowers:
            self.found.reasons["added tokens"] = "texts are put into lower case first"
        if self._tokens.left_out:
            self.found.reasons["texts with pieces outside the vocabulary"] = str(self._tokens.left_out)
        if self.spec.task in _DECODED:
            self._attempt("token lists to texts", self._tokens.compare_decoding)
        images = self._images if self.spec.task == "image-text-to-text" else None
        if self._original.chat_template and images is None:
            self._attempt("chats to prompts", lambda: self._tokens.compare_chats(self.stored.path))
        if images is not None and "images to pixels" in self.found.counts:  # not without transformers' processors
            spec, checkpoint, reader = self.spec, self.checkpoint, images.reader
            self._attempt(
                "images and prompts to inputs", lambda: compare_prompts(spec, checkpoint, reader, self._tokenizer)
            )
            if self._original.chat_template or (self.stored.path / CHAT_TEMPLATE).exists():
                self._attempt(
                    "chats with an image to inputs",
                    lambda: compare_chats(spec, checkpoint, self.stored.path, reader, self._tokenizer),
                )

    def _compare_sounds(self, sounds: SoundComparison) -> None:
        if not sounds.is_described:
            self.found.reasons["sounds"] = "the checkpoint has no preprocessor_config.json"
        else:
            self._attempt("sounds to samples", sounds.compare_samples)
        if self.spec.task != "ctc-speech-recognition":
            return
        if TOKENIZER in self.stored.files:
            self._attempt("token lists to texts", lambda: sounds.compare_decoding(self._tokenizer, self._original))
        else:
            self.found.reasons["texts"] = "the model has no tokenizer"

    def _pixels(self) -> int:
        assert self._images is not None
        count = self._images.compare_pixels()
        self._name(self._images.processed.library)
        return count

    @cached_property
    def _tokens(self) -> TokenComparison:
        lowers = lowers_texts(self.checkpoint)
        return TokenComparison(self._tokenizer, self._original, self.checkpoint.where, self.dropped, lowers=lowers)

    def compare_classes(self, model: nn.Module, theirs: nn.Module) -> None:
        """Compare classes, or texts of sounds, with those of the original's pipeline.

        Args:
            model: zoo's model, in float64.
            theirs: the original model, in float64.

        Raises:
            ParityError: texts, labels or scores differ.
        """
        if self._sounds is not None:
            sounds = self._sounds
            if self.spec.task == "audio-classification" and "sounds to samples" in self.found.counts:
                self._attempt("sounds to classes", lambda: sounds.compare_classes(model, theirs, self._answers))
            elif {"sounds to samples", "token lists to texts"} <= self.found.counts.keys():
                tokenizers = self._tokenizer, self._original
                self._attempt("sounds to texts", lambda: sounds.compare_texts(model, theirs, *tokenizers))
            return
        images = self._images if "images to pixels" in self.found.counts else None
        if images is not None and images.processed.processor is not None:
            if self.spec.task == "image-classification":
                self._attempt("images to classes", lambda: images.compare_classes(model, theirs, self._answers))
            elif self.spec.task in DENSE:
                self._attempt(DENSE[self.spec.task][0], lambda: images.compare_dense(model, theirs, self._answers))
            elif self.spec.task == "zero-shot-image-classification" and "texts to token ids" in self.found.counts:
                parts = images, self._tokenizer, self._original, model, theirs, self._answers
                self._attempt("images and labels to probabilities", lambda: compare_labels(*parts))
        if "texts to token ids" not in self.found.counts or applies_activation(self.checkpoint):
            return
        if self.spec.task == "text-classification":
            self._attempt("texts to classes", lambda: self._classes_of_texts(model, theirs))
        if self.spec.task == "multiple-choice":
            self._attempt("texts to choices", lambda: self._choices(model, theirs))
        single = standard_fields(self.spec.config).problem_type == "single_label_classification"
        if self.spec.task == "token-classification" and single:
            self._attempt("texts to classes of tokens", lambda: self._classes_of_tokens(model, theirs))

    def compare_library(self, model: nn.Module) -> None:
        """Compare vectors or scores with those of sentence-transformers, for its directories.

        Args:
            model: zoo's model, in float64.

        Raises:
            ParityError: vectors or scores differ.
        """
        if "texts to token ids" not in self.found.counts:
            return
        if self.spec.task == "sentence-embedding" and self.checkpoint.modules:
            self._attempt("texts to vectors", lambda: self._vectors(model))
        elif self.spec.task == "text-classification" and applies_activation(self.checkpoint):
            self._attempt("pairs to scores", lambda: self._scores(model))

    def _classes_of_texts(self, model: nn.Module, theirs: nn.Module) -> int:
        import transformers

        config = self.spec.config
        assert isinstance(config, ClassifierConfig)
        kind: Any = transformers.TextClassificationPipeline
        pipeline = kind(model=theirs, tokenizer=self._original, device="cpu")
        cases = self._cases(pairs=True)
        for case in cases:
            logits = self._outputs(model, [case])["logits"][0]
            columns = dict(zip(("text", "text_pair"), case, strict=False))
            rows = ask_exactly(theirs, pipeline, columns, top_k=None, **self._answers.function)
            expected = sorted((str(row["label"]), row["score"]) for row in rows)
            self._answers.require(case, self._answers.scored(logits), expected)
        return len(cases)

    def _choices(self, model: nn.Module, theirs: nn.Module) -> int:
        """Compare the probabilities of choices, which the original reads side by side, padded."""
        if not any(tensor.is_mask for tensor in self.spec.graphs[0].input_tensors()):
            raise Unavailable("answers depend on padding")
        for text, choices in _CHOICES:
            logits = torch.cat([self._outputs(model, [(text, choice)])["logits"][0] for choice in choices])
            columns = [text] * len(choices), list(choices)
            inputs = ask(self._original, *columns, padding=True, return_tensors="pt")
            expected = ask_exactly(theirs, theirs, **{name: value[None] for name, value in inputs.items()})["logits"]
            listed = (zip(choices, scores.softmax(-1).tolist(), strict=True) for scores in (logits, expected[0]))
            self._answers.require([text], *map(list, listed))
        return len(_CHOICES)

    def _classes_of_tokens(self, model: nn.Module, theirs: nn.Module) -> int:
        import transformers

        config = self.spec.config
        assert isinstance(config, ClassifierConfig)
        kind: Any = transformers.TokenClassificationPipeline
        pipeline = kind(
            model=theirs, tokenizer=self._original, device="cpu", aggregation_strategy="none", ignore_labels=[]
        )
        names = self._answers.class_names
        cases = self._cases(pairs=False)
        for case in cases:
            chances = self._outputs(model, [case])["logits"][0].softmax(-1)
            rows = ask_exactly(theirs, pipeline, *case)
            best = [(row["index"], int(chances[row["index"]].argmax())) for row in rows]
            labels = [(names[label], float(chances[place, label])) for place, label in best]
            self._answers.require(case, labels, [(str(row["entity"]), float(row["score"])) for row in rows])
        return len(cases)

    def _vectors(self, model: nn.Module) -> int:
        original = self._load("SentenceTransformer", model)
        prompts = read_prefixes(self.stored)
        cases, count = self._cases(pairs=False), 0
        names = [None, *[name for name in prompts.texts if name != prompts.default][:_PROMPTS]]
        for name in names:
            prefix = prompts.texts.get(prompts.default or "", "") if name is None else prompts.texts[name]
            for case in cases:
                text = prefix + case[0]
                vector = self._outputs(model, [(text,)])["sentence_embedding"][0]
                options = {"prompt_name": name, "convert_to_tensor": True, "show_progress_bar": False}
                expected = ask_exactly(original, original.encode, list(case), **options)[0]
                count += 1
                if vector.shape != expected.shape or not close(vector, expected.double(), self._dtype):
                    problem = f"the vector of {text!r} is {shown(vector)}, that of the original {shown(expected)}"
                    raise ParityError(problem, self.checkpoint.where, REMEDY)
        self._compare_long(original)
        return count

    def _compare_long(self, original: Any) -> None:
        """Compare the number of tokens that is left of a long text, without the model."""
        if self._limit is None:
            return
        text = "The rain has stopped. " * (1 + self._limit // 4)
        read = getattr(original, "preprocess", None) or original.tokenize
        expected = ask_exactly(original, read, [text])["input_ids"][0].tolist()
        ids = self._tokenizer.truncating(self._limit).encode(text).ids
        if ids != expected:
            problem = f"a long text is truncated to {len(ids)} tokens, by the original to {len(expected)}"
            raise ParityError(problem, self.checkpoint.where, REMEDY)

    def _scores(self, model: nn.Module) -> int:
        config = self.spec.config
        assert isinstance(config, ClassifierConfig)
        original = self._load("CrossEncoder", model)
        options: dict[str, Any] = {"convert_to_tensor": True, "show_progress_bar": False}
        if isinstance(original.activation_fn, nn.Identity) and config.num_classes > 1:  # applies nothing by default
            options["activation_fn"] = FUNCTIONS[str(config.problem_type)]
        cases = self._cases(pairs=True)[-len(_PAIRS) :]
        for case in cases:
            scores = scores_of(config, self._outputs(model, [case])["logits"][0])
            expected = ask_exactly(original, original.predict, [case], **options).double().reshape(-1)
            if scores.shape != expected.shape or not close(scores, expected, self._dtype):
                problem = f"the scores of {case!r} are {shown(scores)}, those of the original {shown(expected)}"
                raise ParityError(problem, self.checkpoint.where, REMEDY)
        return len(cases)

    def _load(self, name: str, model: nn.Module) -> Any:
        """Load a class of sentence-transformers, in float64."""
        if importlib.util.find_spec("sentence_transformers") is None:
            raise Unavailable("sentence-transformers is not installed")
        if self.checkpoint.planned is not None:
            raise Unavailable("the names of tensors differ from those that it reads")
        require_memory(2 * 8 * sum(parameter.numel() for parameter in model.parameters()))
        import sentence_transformers

        try:
            loaded = getattr(sentence_transformers, name)(
                str(self.checkpoint.path),
                device="cpu",
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"dtype": getattr(torch, self._dtype), "attn_implementation": "eager"},
            )
        except Exception as error:  # another library may raise anything for an unknown file
            raise Unavailable(f"sentence-transformers cannot load it: {_line(error)}") from error
        self._name(sentence_transformers)
        return loaded.eval().double()

    @property
    def _dtype(self) -> str:
        return self.stored.dtype

    def _cases(self, *, pairs: bool) -> list[tuple[str, ...]]:
        """Return the texts that the model can read, and pairs of texts."""
        cases: list[tuple[str, ...]] = []
        for case in [*((text,) for text in _TEXTS), *(_PAIRS if pairs else ())]:
            try:
                self._tokenizer(_given(case))
                cases.append(case)
            except (ArtifactError, UsageError):  # such as too long for a small model, or without tokens
                continue
        if not cases:
            raise Unavailable("no text fits the model")
        return cases

    def _outputs(self, model: nn.Module, cases: Sequence[tuple[str, ...]]) -> dict[str, Tensor]:
        if len(self.spec.graphs) > 1:
            raise Unavailable("the model has several graphs")
        try:
            arrays = self._tokenizer.truncating(self._limit)([_given(case) for case in cases])
        except (ArtifactError, UsageError) as error:  # such as a prompt that is too long
            raise Unavailable(f"zoo refuses a text: {error}") from error
        taken = inspect.signature(model.forward).parameters
        feeds = {name: torch.from_numpy(array) for name, array in arrays.items() if name in taken}
        with torch.no_grad():
            return call(self.spec.config, model, feeds, torch.float64)


def _given(case: tuple[str, ...]) -> str | tuple[str, str]:
    return case[0] if len(case) == 1 else (case[0], case[1])


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
