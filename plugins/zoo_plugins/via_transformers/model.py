"""A model of transformers with zoo's inputs and outputs, under the names of its checkpoints.

B batch, T tokens of this call, S tokens including those before, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from zoo.modules import SharedModule, store_buffers
from zoo.nn import Cache, EmbeddingHead, LayerStates, number_features, positions_of
from zoo_plugins.via_transformers import contrastive
from zoo_plugins.via_transformers.blocks import blocks_of_types
from zoo_plugins.via_transformers.cache import PastCache, cache_argument
from zoo_plugins.via_transformers.fields import ENCODER_DECODER_TASKS, IMAGE_OUTPUTS, ClassFields
from zoo_plugins.via_transformers.image_grids import image_grid
from zoo_plugins.via_transformers.image_texts import decode_embeddings, embed, encode_image
from zoo_plugins.via_transformers.originals import build_original, computed_names
from zoo_plugins.via_transformers.replaced import (
    Lengths,
    count_positions,
    given_positions,
    replace_methods,
    use_real_rotations,
    use_whole_tiles,
    whole_images,
    without_branches,
)
from zoo_plugins.via_transformers.seq2seq import decode, encode

__all__ = ["ViaTransformers"]


class ViaTransformers(SharedModule):
    """The class of transformers that the configuration names.

    All tensors have the names of the original's state dict. What the original computes at construction, such as the
    frequencies of rotary positions, is stored as well.
    """

    def __init__(self, c: ClassFields) -> None:
        super().__init__()
        self.config = c
        original = build_original(c)
        self.fixed_tensors = computed_names(original, c.computed)
        for name in computed_names(original, ("*",)):
            if name not in self.fixed_tensors:
                _leave_out(original, name)
        store_buffers(original)
        count_positions(original)
        use_real_rotations(original)
        replace_methods(original)
        use_whole_tiles(original)
        self.share(original)
        if c.task == "sentence-embedding":
            self.embedding_head = EmbeddingHead(c, c.hidden_size or 0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ViaTransformers:
        """Convert tensors, but keep computed ones in float32 at least, as transformers does."""
        kept = {name: self.get_buffer(name) for name in self.fixed_tensors}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            path, _, short = name.rpartition(".")
            after = self.get_buffer(name)
            if after.is_floating_point() and after.element_size() < before.element_size() <= 4:
                self.get_submodule(path).register_buffer(short, before.to(after.device))
        return self

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        past_states: list[LayerStates] | None = None,
        *,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        input_values: Tensor | None = None,
        input_features: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the outputs of the configured task, by name; of an encoder-decoder without a target, the states.

        Args:
            input_ids: (B, T), of a class that reads texts.
            attention_mask: (B, S), 1 for a token and 0 for padding, the past included; of sound, of its samples.
            token_type_ids: (B, T), the segment of each token; all 0 by default. Of a class with ``token_blocks``, the
                types with which transformers calls it; without them, all tokens are causal.
            past_key_values: keys and values of earlier calls; extended in place.
            past_states: states after earlier calls, of the layers that have any; replaced in place.
            decoder_input_ids: (B, T), the target that an encoder-decoder reads, as in training.
            decoder_attention_mask: (B, T), of the target.
            pixel_values: (B, C, height, width), of a class that reads images; of a text with an image that is cut into
                tiles, those of the rows in turn, of each row as many.
            input_values: (B, samples), of a class that reads sound; (B, frames, mel bins), of AST.
            input_features: (B, mel bins, frames), of Whisper.
        """
        c = self.config
        options: dict[str, Any]
        if c.task in ENCODER_DECODER_TASKS:
            source = {"input_ids": input_ids, "attention_mask": attention_mask, "pixel_values": pixel_values}
            return self._translate(source, decoder_input_ids, decoder_attention_mask)
        if c.task == "image-text-to-text":
            assert input_ids is not None
            embeddings = self._embed_with_image(input_ids, attention_mask, pixel_values)
            blocks = None if token_type_ids is None else blocks_of_types(c, token_type_ids)
            grid = image_grid(c, input_ids, attention_mask, pixel_values) if c.grid_positions else None
            embedded = embeddings, attention_mask, past_key_values, past_states
            return {"logits": self.decode_embeddings(*embedded, block_ids=blocks, image_grid=grid)}
        if pixel_values is not None and input_ids is not None:
            texts, images = self.embed_texts(input_ids, attention_mask, token_type_ids), self.embed_images(pixel_values)
            return {"logits_per_image": self.compare(images, texts), "text_embeds": texts, "image_embeds": images}
        if pixel_values is not None:
            return self._see(pixel_values)
        if input_values is not None or input_features is not None:
            return {"logits": self._hear(input_values, input_features, attention_mask)}
        assert input_ids is not None
        length = input_ids.shape[1]
        total = length + (past_key_values.length if past_key_values is not None else 0)
        if attention_mask is None:
            attention_mask = torch.ones(input_ids.shape[0], total, dtype=torch.long, device=input_ids.device)
        if c.task == "text-classification" and c.pad_token_id is not None:
            input_ids = input_ids.masked_fill(attention_mask == 0, c.pad_token_id)  # decoders look for the last token
        options = {}
        positions = positions_of(length, total, padding=attention_mask, device=input_ids.device)
        if c.counts_positions:
            options["position_ids"] = positions
        if c.type_vocab_size and c.task != "text-generation":
            options["token_type_ids"] = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        if "lengths" in signature(self.original.forward).parameters:
            options["lengths"] = Lengths(input_ids)
        if c.task == "text-generation":
            has_past = past_key_values is not None or past_states is not None
            pasts = (past_key_values or Cache.empty(0), past_states or (), c.key_layers, c.state_layers)
            options["use_cache"] = has_past
            options[cache_argument(self.original)] = PastCache(*pasts) if has_past else None
        given = given_positions(self.original, positions if c.task == "text-generation" else None)
        options |= {"input_ids": input_ids, "attention_mask": attention_mask}
        with given, without_branches(self.original):
            found = self.original(**self._with_choices(options), return_dict=True)
        match c.task:
            case "feature-extraction":
                return {"last_hidden_state": found["last_hidden_state"]}
            case "sentence-embedding":
                x = found["last_hidden_state"]  # (B, T, E)
                return {"sentence_embedding": self.embedding_head(x, attention_mask), "last_hidden_state": x}
            case "question-answering":
                return {name: found[name] for name in ("start_logits", "end_logits")}
        return {"logits": found["logits"]}

    def _translate(
        self, source: dict[str, Tensor | None], decoder_input_ids: Tensor | None, decoder_attention_mask: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the logits of a target, or the states of its source without one."""
        encoded = self.encode(**source)
        if decoder_input_ids is None:
            return {"last_hidden_state": encoded["last_hidden_state"]}
        masks = decoder_attention_mask, source["attention_mask"]
        return {"logits": self.decode(decoder_input_ids, encoded["cross_key_values"], *masks)}

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
    ) -> dict[str, Any]:
        """Encode the source of an encoder-decoder, a text or an image.

        Args:
            input_ids: (B, S).
            attention_mask: (B, S), 1 for a token and 0 for padding.
            pixel_values: (B, C, height, width).

        Returns:
            ``last_hidden_state``, (B, S, E), and ``cross_key_values``, its keys and values for each decoder layer.
        """
        layers = self.config.num_layers or 0
        if pixel_values is not None:
            self._forget()
            return encode(self.original, layers, {"pixel_values": pixel_values})
        assert input_ids is not None
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return encode(self.original, layers, {"input_ids": input_ids, "attention_mask": mask})

    def decode(
        self,
        decoder_input_ids: Tensor,
        cross_key_values: Cache,
        decoder_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Return the logits of the next target token, (B, T, V).

        Args:
            decoder_input_ids: (B, T).
            cross_key_values: from :meth:`encode`.
            decoder_attention_mask: (B, past + T), 1 for a token and 0 for padding.
            attention_mask: (B, S), of a source that is a text.
            past_key_values: keys and values of earlier calls; extended in place.
        """
        masks = decoder_attention_mask, attention_mask
        return decode(self.original, self.config, decoder_input_ids, cross_key_values, *masks, past_key_values)

    def _see(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Return the outputs for images, of a class that reads nothing else."""
        self._forget()
        with whole_images(self.original):
            found = self.original(pixel_values=pixel_values, return_dict=True)
        if self.config.task == "image-classification":
            return {"logits": found.get("logits", found.get("last_hidden_state"))}  # PP-LCNet's has the latter name
        return {name: found[name] for name in self._image_outputs() if found.get(name) is not None}

    def _with_choices(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return texts (B, T) with one choice each, (B, 1, T), for a class that reads choices."""
        if self.config.task != "multiple-choice":
            return options
        return {name: value[:, None] for name, value in options.items() if isinstance(value, Tensor)}

    def _hear(self, input_values: Tensor | None, input_features: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return the logits of sound, or of spectrograms, which have no mask."""
        options: dict[str, Any] = {"input_features": input_features}
        if input_values is not None:
            has_mask = self.config.spectrogram is None and not self.config.reads_padding
            options = self._without_padding(input_values, mask) if has_mask else {"input_values": input_values}
        logits: Tensor = self.original(**options, return_dict=True)["logits"]
        return logits

    def encode_image(self, pixel_values: Tensor) -> Tensor:
        """Return the features of images, (B, N, E), of which a text has N tokens.

        Of grids, they are (B, rows, columns, E'), where E' includes what is added after layers of the decoder.

        Args:
            pixel_values: (B, C, height, width).
        """
        return encode_image(self.original, pixel_values)

    def embed(
        self, input_ids: Tensor, image_indices: Tensor, image_features: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Return the embeddings of a text with an image, (B, T, E), zeros for padding.

        Args:
            input_ids: (B, T).
            image_indices: (B, T), 0 for a token of the text, n for the n-th feature of the row's image.
            image_features: (B, N, E), from :meth:`encode_image`; without effect where all indices are 0.
            attention_mask: (B, T), 1 for a token and 0 for padding.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return embed(self.original, input_ids, image_indices, image_features, mask)

    def decode_embeddings(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        past_states: list[LayerStates] | None = None,
        *,
        block_ids: Tensor | None = None,
        image_grid: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the next token, (B, T, V).

        Args:
            inputs_embeds: (B, T, E), from :meth:`embed`.
            attention_mask: (B, S), 1 for a token and 0 for padding, the past included.
            past_key_values: keys and values of earlier calls; extended in place.
            past_states: states after earlier calls, of the layers that have any; replaced in place.
            block_ids: (B, T), the same positive number for tokens that see each other, later ones included; by default
                0, for tokens that see earlier ones alone.
            image_grid: (B, 3), in a model with ``grid_positions``, the number of tokens before the image of a text, and
                the rows and columns of its features; 0 without one.
        """
        pasts = past_key_values, past_states
        return decode_embeddings(
            self.original, self.config, inputs_embeds, attention_mask, *pasts, block_ids, image_grid
        )

    def embed_texts(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return the vectors of texts, of length 1, (M, D).

        Args:
            input_ids: (M, T).
            attention_mask: (M, T), 1 for a token and 0 for padding; without effect if the class reads padding.
            token_type_ids: (M, T), the segment of each token; all 0 by default.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        c = self.config
        return contrastive.embed_texts(
            self.original, input_ids, None if c.pad_texts else mask, types if c.type_vocab_size else None
        )

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Return the vectors of images, of length 1, (N, C, height, width) -> (N, D)."""
        return contrastive.embed_images(self.original, pixel_values)

    def compare(self, image_embeds: Tensor, text_embeds: Tensor) -> Tensor:
        """Return the logits of all pairs of an image and a text, (N, D) and (M, D) -> (N, M)."""
        return contrastive.compare(self.original, image_embeds, text_embeds)

    def _embed_with_image(
        self, input_ids: Tensor, attention_mask: Tensor | None, pixel_values: Tensor | None
    ) -> Tensor:
        """Return the embeddings of a text, whose tokens of an image have the features of the row's image in turn."""
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        if pixel_values is None:
            none = torch.zeros_like(input_ids)
            width = (self.config.hidden_size or 0) * (1 + self.config.image_layers)
            return self.embed(input_ids, none, none.new_zeros(len(none), 1, width), mask)
        features = self.encode_image(pixel_values)  # (tiles of all rows, N, E)
        features = features.reshape(len(input_ids), -1, features.shape[-1])
        indices = number_features(input_ids, self.config.image_token_id or 0, features.shape[1], mask)
        return self.embed(input_ids, indices, features, mask)

    def _without_padding(self, samples: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """Return sound with silence for padding, and its mask, in which no row is too short for a position."""
        if mask is None:
            mask = torch.ones(samples.shape, dtype=torch.long, device=samples.device)
        least = (torch.arange(samples.shape[1], device=samples.device) < (self.config.min_samples or 0)).long()
        return {"input_values": samples.masked_fill(mask == 0, 0), "attention_mask": mask.maximum(least)}

    def _forget(self) -> None:
        """Remove what layers of LeViT have computed from weights that may have changed since."""
        for module in self.original.modules():
            vars(module).get("attention_bias_cache", {}).clear()

    def _image_outputs(self) -> Iterable[str]:
        """Return the names of the outputs for images; before the class is inspected, those that it may have."""
        return self.config.output_sizes or IMAGE_OUTPUTS[self.config.task]


def _leave_out(original: Module, name: str) -> None:
    """Remove a buffer that no output depends on.

    Integers stay as zeros outside the state, since classes take positions that they do not use.
    """
    path, _, short = name.rpartition(".")
    module = original.get_submodule(path)
    buffer = module.get_buffer(short)
    delattr(module, short)
    if not buffer.is_floating_point():
        object.__setattr__(module, short, torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu"))
