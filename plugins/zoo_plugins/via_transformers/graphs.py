"""The graphs of models of transformers."""

from __future__ import annotations

from dataclasses import replace

from zoo import Graph, KeyValues, Size, States, TensorSpec, attentions, block_ids, floats, mask, token_ids
from zoo_plugins.clip.config import contrastive_graphs
from zoo_plugins.via_transformers.fields import (
    ENCODER_DECODER_TASKS,
    IMAGE_TASKS,
    READS_IMAGES,
    SOUND_TASKS,
    ClassFields,
)

__all__ = ["graphs_of", "size_of_sides", "spectrogram_input"]


def graphs_of(c: ClassFields) -> tuple[Graph, ...]:
    """Declare one graph: for prefill and decoding, or for a text, image or sound as a whole; or encoder and decoder."""
    if c.task in IMAGE_TASKS:
        return (_image_graph(c),)
    if c.task in SOUND_TASKS:
        return (_sound_graph(c),)
    if c.task in ENCODER_DECODER_TASKS:
        return _encoder_and_decoder(c)
    if c.task == "text-generation":
        return (_decoder(c),)
    if c.task == "image-text-to-text":
        return _image_and_text(c)
    if c.task == "zero-shot-image-classification":
        return _contrastive(c)
    inputs = [token_ids("input_ids", c.vocab_size or 0)]
    if not c.reads_padding:
        inputs.append(mask("attention_mask", padding="right"))
    if c.type_vocab_size > 1:
        inputs.append(token_ids("token_type_ids", c.type_vocab_size))
    recorded = attentions(c.attention_layers, c.num_heads)
    return (Graph(inputs=tuple(inputs), outputs=_text_outputs(c), attentions=recorded),)


def _decoder(c: ClassFields) -> Graph:
    """Declare a decoder, whose past has keys and values, states, or both: each numbered among the layers of its kind.

    Convolutions and recurrences read padding, whose inputs are zeros, as any other token: only before a text is it
    without effect.
    """
    length = "past_sequence + sequence" if c.num_key_layers else "sequence"
    states = [floats(name, "batch", *sizes) for name, sizes in c.state_sizes.items()]
    pasts: list[KeyValues | States] = []
    if c.num_key_layers:
        pasts.append(_key_values(c, "past_key_values", "past_sequence"))
    if states:
        pasts.append(States(num_layers=len(c.state_layers), states=tuple(states)))
    return Graph(
        inputs=(
            token_ids("input_ids", c.vocab_size or 0),
            mask("attention_mask", length=length, padding="left" if states else "both"),
        ),
        outputs=(floats("logits", "batch", "sequence", c.vocab_size or 0),),
        past=tuple(pasts),
        attentions=attentions(c.attention_layers, c.num_heads, keys=length),
    )


def _image_graph(c: ClassFields) -> Graph:
    outputs = [floats(name, "batch", *sizes) for name, sizes in c.output_sizes.items()]
    if c.task == "image-classification":
        outputs = [floats("logits", "batch", c.num_classes)]
    count = c.num_patches or 0
    return Graph(
        inputs=(_pixels(c),),
        outputs=tuple(outputs),
        attentions=attentions(c.attention_layers, c.num_heads, queries=count, keys=count),
        sizes=dict.fromkeys(("height", "width"), size_of_sides(c)) if c.has_free_images else {},
    )


def size_of_sides(c: ClassFields) -> Size:
    """Return the sizes that the sides of images may have if they have many."""
    most = c.image_sides[1] if c.image_resize == "edges" else None
    return Size(min=c.min_image_size, max=most, multiple_of=c.image_multiple or 1)


def _sound_graph(c: ClassFields) -> Graph:
    """Declare a graph for sound, whose convolutions make one position of several samples, or for a spectrogram."""
    classes = floats("logits", "batch", c.num_classes)
    if c.spectrogram is not None:
        name, sizes = spectrogram_input(c)
        return Graph(inputs=(floats(name, "batch", *sizes),), outputs=(classes,))
    least, step = c.min_samples or 1, c.samples_per_position or 1
    unused = least - c.min_positions * step
    positions = f"(samples {'-' if unused > 0 else '+'} {abs(unused)}) // {step}"
    inputs = [floats("input_values", "batch", "samples")]
    if not c.reads_padding:
        inputs.append(mask("attention_mask", length="samples", padding="right"))
    logits = floats("logits", "batch", positions, c.vocab_size or 0)
    if c.task == "audio-classification":
        logits = classes
    return Graph(
        inputs=tuple(inputs),
        outputs=(logits,),
        attentions=attentions(c.attention_layers, c.num_heads, queries=positions, keys=positions),
        causal=False,
        sizes={"samples": Size(min=least)},
    )


def spectrogram_input(c: ClassFields) -> tuple[str, tuple[int, int]]:
    """Return the name of the input that is a spectrogram, and its sizes after the batch."""
    bins, frames = c.num_mel_bins or 0, c.num_frames or 0
    return ("input_features", (bins, frames)) if c.spectrogram == "whisper" else ("input_values", (frames, bins))


def _pixels(c: ClassFields) -> TensorSpec:
    sides = ("height", "width") if c.has_free_images else c.image_sides
    return floats("pixel_values", "batch", c.num_channels or 0, *sides)


def _text_outputs(c: ClassFields) -> tuple[TensorSpec, ...]:
    width = c.hidden_size or 0
    states = floats("last_hidden_state", "batch", "sequence", width)
    match c.task:
        case "sentence-embedding":
            return (floats("sentence_embedding", "batch", c.vector_size(width)), states)
        case "fill-mask":
            return (floats("logits", "batch", "sequence", c.vocab_size or 0),)
        case "text-classification":
            return (floats("logits", "batch", c.num_classes),)
        case "token-classification":
            return (floats("logits", "batch", "sequence", c.num_classes),)
        case "multiple-choice":
            return (floats("logits", "batch", 1),)
        case "question-answering":
            return tuple(floats(name, "batch", "sequence") for name in ("start_logits", "end_logits"))
    return (states,)


def _encoder_and_decoder(c: ClassFields) -> tuple[Graph, ...]:
    """Declare an encoder, which also projects the keys and values of cross-attention, and a decoder.

    The source is a text of any length, or an image, which has no padding.
    """
    length: str | int = c.num_patches or "encoder_sequence"
    if c.task in READS_IMAGES:
        source, masks = _pixels(c), []
    else:
        source = token_ids("input_ids", c.vocab_size or 0, length="encoder_sequence")
        masks = [mask("attention_mask", length="encoder_sequence", padding="right")]
    cross = _key_values(c, "cross_key_values", length)
    encoder = Graph(
        name="encoder",
        method="encode",
        inputs=(source, *masks),
        outputs=(floats("last_hidden_state", "batch", length, c.hidden_size or 0), cross),
        causal=False,
    )
    decoder = Graph(
        name="decoder",
        method="decode",
        inputs=(
            token_ids("decoder_input_ids", c.vocab_size or 0),
            mask("decoder_attention_mask", length="past_sequence + sequence"),
            *masks,
            cross,
        ),
        outputs=(floats("logits", "batch", "sequence", c.vocab_size or 0),),
        past=_key_values(c, "past_key_values", "past_sequence"),
    )
    return encoder, decoder


def _image_and_text(c: ClassFields) -> tuple[Graph, ...]:
    """Declare a graph for an image, one for the embeddings of a text with it, and a decoder that reads these.

    The embeddings are a graph of their own, so that the decoder may read a text with an image in any number of calls.
    Of images that are cut into tiles, each tile is a row of the first graph.
    """
    count, width = c.num_patches or 1, c.hidden_size or 0
    made = features = floats("image_features", "batch", count, width)
    sizes, most = {}, count
    if c.has_free_images:
        return _grid_and_text(c)
    if c.tiling is not None and c.tiling.most > 1:
        most = count * c.tiling.most_in_all
        made = floats("tile_features", "batch", count, width)
        features = floats("image_features", "batch", "features", width)
        sizes = {"features": Size(min=count, max=most, multiple_of=count)}
    embeddings = floats("inputs_embeds", "batch", "sequence", width)
    image = Graph(name="encoder", method="encode_image", inputs=(_pixels(c),), outputs=(made,))
    ids = token_ids("input_ids", c.vocab_size or 0), token_ids("image_indices", most + 1)
    inputs = *ids, features, mask("attention_mask")
    embedder = Graph(name="embedder", method="embed", inputs=inputs, outputs=(embeddings,), sizes=sizes)
    decoder = _decoder(c)
    reads = embeddings, *decoder.inputs[1:], *([block_ids("block_ids")] if c.token_blocks else [])
    return image, embedder, replace(decoder, name="decoder", method="decode_embeddings", inputs=reads)


def _grid_and_text(c: ClassFields) -> tuple[Graph, ...]:
    """Declare the graphs of :func:`_image_and_text` for images of many sizes, with a feature for each multiple of them.

    The features of an image are those of the embedder in turn. Beside those that stand for tokens, they have others,
    which the decoder adds after layers.
    """
    width, size = (c.hidden_size or 0) * (1 + c.image_layers), c.image_multiple or 1
    made = floats("grid_features", "batch", f"height // {size}", f"width // {size}", width)
    sides = dict.fromkeys(("height", "width"), Size(min=size, multiple_of=size))
    image = Graph(name="encoder", method="encode_image", inputs=(_pixels(c),), outputs=(made,), sizes=sides)
    ids = token_ids("input_ids", c.vocab_size or 0), token_ids("image_indices", (c.max_seq_len or 1) + 1)
    embeddings = floats("inputs_embeds", "batch", "sequence", width)
    inputs = *ids, floats("image_features", "batch", "features", width), mask("attention_mask")
    embedder = Graph(name="embedder", method="embed", inputs=inputs, outputs=(embeddings,))
    decoder = _decoder(c)
    reads = embeddings, *decoder.inputs[1:]
    if c.grid_positions:  # the tokens before the image, and the rows and columns of its features
        reads += (token_ids("image_grid", c.max_seq_len or 1, length=3),)
    return image, embedder, replace(decoder, name="decoder", method="decode_embeddings", inputs=reads)


def _contrastive(c: ClassFields) -> tuple[Graph, ...]:
    """Declare a graph for texts, one for images, and one for the logits of all pairs."""
    length = c.max_seq_len if c.pad_texts and c.max_seq_len else "sequence"
    texts = [token_ids("input_ids", c.vocab_size or 0, length=length, rows="texts")]
    if not c.pad_texts:
        texts.append(mask("attention_mask", padding="right", rows="texts"))
    if c.type_vocab_size > 1:
        texts.append(token_ids("token_type_ids", c.type_vocab_size, length=length, rows="texts"))
    pixels = floats("pixel_values", "images", c.num_channels or 0, *c.image_sides)
    return contrastive_graphs(texts, pixels, c.embedding_size or 0)


def _key_values(c: ClassFields, name: str, length: str | int) -> KeyValues:
    return KeyValues(
        name=name,
        num_layers=c.num_key_layers,
        num_heads=c.num_kv_heads or 0,
        head_dim=c.head_dim or 0,
        value_head_dim=c.value_head_dim,
        length=length,
    )
