"""BERT and its heads against transformers with the same weights, and invariances of a padded encoder."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    PreTrainedModel,
)

from tests.rows import each_row
from zoo.errors import UsageError
from zoo.registry import registry
from zoo_plugins.bert.config import BERTConfig
from zoo_plugins.bert.model import BERT

SIZES = {
    "vocab_size": 53,
    "type_vocab_size": 3,
    "max_seq_len": 12,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 3,
    "intermediate_size": 40,
    "norm_eps": 1e-4,
    "num_classes": 5,
}
# Names of the activations in transformers.
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
LENGTHS = [8, 5, 1]


def make(**options: object) -> BERT:
    """Build a small float64 model in evaluation mode with random weights, biases and norms."""
    model = BERT(BERTConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.requires_grad_(False)


def transformers_twin(ours: BERT, kind: type[PreTrainedModel]) -> PreTrainedModel:
    """Build the transformers model with our weights: a base model, or one with a head."""
    c = ours.config
    theirs = kind(
        BertConfig(
            vocab_size=c.vocab_size,
            type_vocab_size=c.type_vocab_size,
            max_position_embeddings=c.max_seq_len,
            hidden_size=c.hidden_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            intermediate_size=c.intermediate_size,
            hidden_act=ACTIVATIONS[c.activation],
            layer_norm_eps=c.norm_eps,
            num_labels=c.num_classes,
            tie_word_embeddings=c.tie_embeddings,
            attn_implementation="eager",
        )
    )
    weights: dict[str, Tensor] = {}
    encoder = "" if kind is BertModel else "bert."

    def copy(name: str, layer: nn.Module) -> None:
        weights.update({f"{name}.{key}": tensor for key, tensor in layer.state_dict().items()})

    tables = [part for part in ours.embeddings.children() if isinstance(part, nn.Embedding)]
    for name, table in zip(("word", "position", "token_type"), tables, strict=True):
        copy(f"{encoder}embeddings.{name}_embeddings", table)
    copy(f"{encoder}embeddings.LayerNorm", ours.embeddings.norm)
    for index, block in enumerate(ours.blocks):
        layer = f"{encoder}encoder.layer.{index}"
        for name in ("query", "key", "value"):
            copy(f"{layer}.attention.self.{name}", getattr(block.attention, name))
        copy(f"{layer}.attention.output.dense", block.attention.output)
        copy(f"{layer}.attention.output.LayerNorm", block.norm_1)
        copy(f"{layer}.intermediate.dense", block.mlp.up)
        copy(f"{layer}.output.dense", block.mlp.down)
        copy(f"{layer}.output.LayerNorm", block.norm_2)
    if ours.pooler is not None:
        copy(f"{encoder}pooler.dense", ours.pooler)
    if c.task in ("fill-mask", "pretraining"):
        copy("cls.predictions.transform.dense", ours.masked_lm.dense)
        copy("cls.predictions.transform.LayerNorm", ours.masked_lm.norm)
        copy("cls.predictions.decoder", ours.masked_lm.decoder)
        weights["cls.predictions.bias"] = ours.masked_lm.decoder.bias
    if c.task == "pretraining":
        copy("cls.seq_relationship", ours.next_sentence)
    if c.task in ("text-classification", "token-classification"):
        copy("classifier", ours.classifier)
    if c.task == "question-answering":
        copy("qa_outputs", ours.span)
    theirs = theirs.double().eval().requires_grad_(False)
    theirs.load_state_dict(weights)
    return theirs


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Draw token ids, a right padding mask with rows of ``LENGTHS``, and token types, in BERT's order."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))
    ids = torch.randint(0, SIZES["vocab_size"], shape, generator=generator)
    types = torch.randint(0, SIZES["type_vocab_size"], shape, generator=generator)
    mask = torch.tensor([[1] * length + [0] * (shape[1] - length) for length in LENGTHS])
    return ids, mask, types


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("typed", [True, False])
def test_encoder_equals_transformers(activation: str, side: str | None, typed: bool) -> None:
    """Hidden states and pooler, with and without padding (which BERT counts in positions) and token types."""
    ours, (ids, mask, types) = make(activation=activation), batch()
    if side == "left":
        mask = mask.flip(1)
    arguments = (ids, mask if side else None, types if typed else None)
    actual, expected = ours(*arguments), transformers_twin(ours, BertModel)(*arguments)
    assert actual.keys() == {"last_hidden_state", "pooler_output"}
    tokens = mask.bool() if side else torch.ones_like(mask, dtype=torch.bool)
    for name in actual:
        found, wanted = actual[name], expected[name]
        if name == "last_hidden_state":
            found, wanted = found[tokens], wanted[tokens]
        assert_close(found, wanted, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_heads": 1},
        {"hidden_size": 35, "num_heads": 5, "norm_eps": 1e-12},
        {"num_layers": 1, "intermediate_size": 7},
        {"num_layers": 4, "norm_eps": 0.1},
    ],
)
def test_encoder_equals_transformers_at_other_sizes(sizes: dict[str, float]) -> None:
    """An odd width, an odd number of heads, a narrow feed-forward network, and another eps."""
    ours, arguments = make(**sizes), batch()
    expected = transformers_twin(ours, BertModel)(*arguments)
    assert_close(ours(*arguments)["pooler_output"], expected.pooler_output, atol=1e-10, rtol=0)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_masked_language_model_equals_transformers(activation: str, tie_embeddings: bool) -> None:
    """Logits of every token; the head's activation is the encoder's."""
    ours = make(task="fill-mask", pooler=False, activation=activation, tie_embeddings=tie_embeddings)
    arguments = batch()
    expected, kept = transformers_twin(ours, BertForMaskedLM)(*arguments).logits, arguments[1].bool()
    actual = ours(*arguments)
    assert actual.keys() == {"logits"}
    assert_close(actual["logits"][kept], expected[kept], atol=1e-10, rtol=0)


def test_pretraining_equals_transformers() -> None:
    """Both outputs."""
    ours, arguments = make(task="pretraining"), batch()
    actual, expected = ours(*arguments), transformers_twin(ours, BertForPreTraining)(*arguments)
    kept = arguments[1].bool()
    assert actual.keys() == {"logits", "next_sentence_logits"}
    assert_close(actual["logits"][kept], expected.prediction_logits[kept], atol=1e-10, rtol=0)
    assert_close(actual["next_sentence_logits"], expected.seq_relationship_logits, atol=1e-10, rtol=0)


def test_next_sentence_equals_transformers() -> None:
    """The model with only this head."""
    ours, arguments = make(task="pretraining"), batch()
    theirs = BertForNextSentencePrediction(transformers_twin(ours, BertForPreTraining).config).double().eval()
    theirs.bert.load_state_dict(transformers_twin(ours, BertForPreTraining).bert.state_dict())
    theirs.cls.seq_relationship.load_state_dict(ours.next_sentence.state_dict())
    assert_close(ours(*arguments)["next_sentence_logits"], theirs(*arguments).logits, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "layers",
    [(-1,), (-2,), (-4, -3, -2, -1), (0, 1, 2, 3, 4), (4, 0), (-5, -5), (3, -2)],
    ids=lambda layers: str(layers),
)
def test_features_equal_transformers(layers: tuple[int, ...]) -> None:
    """The hidden states of chosen layers, concatenated in that order (section 5.3); other outputs are unchanged."""
    ours, arguments = make(num_layers=4, feature_layers=layers), batch()
    theirs, kept = transformers_twin(ours, BertModel), arguments[1].bool()
    expected = theirs(*arguments, output_hidden_states=True)
    actual = ours(*arguments)
    assert list(actual) == ["last_hidden_state", "features", "pooler_output"]
    wanted = torch.cat([expected.hidden_states[layer] for layer in layers], dim=-1)
    assert wanted.shape[-1] == len(layers) * SIZES["hidden_size"]
    assert_close(actual["features"][kept], wanted[kept], atol=1e-10, rtol=0)
    assert_close(actual["last_hidden_state"][kept], expected.last_hidden_state[kept], atol=1e-10, rtol=0)
    (graph,) = ours.config.graphs()
    assert [tensor.name for tensor in graph.output_tensors()] == list(actual)


@pytest.mark.parametrize("merge", ["concat", "sum", "mean"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_merged_layers_equal_transformers(merge: str, pooling: str) -> None:
    """Features are a concatenation, sum or mean of hidden states, and sentence embeddings pool them."""
    layers, arguments = (-4, -3, -2, -1), batch()
    ours = make(num_layers=4, feature_layers=layers, feature_merge=merge)
    states = transformers_twin(ours, BertModel)(*arguments, output_hidden_states=True).hidden_states
    chosen, kept = [states[layer] for layer in layers], arguments[1].bool()
    wanted = {
        "concat": torch.cat(chosen, -1),
        "sum": sum(chosen[1:], chosen[0]),
        "mean": sum(chosen[1:], chosen[0]) / 4,
    }
    actual = ours(*arguments)["features"]
    assert_close(actual[kept], wanted[merge][kept], atol=1e-10, rtol=0)
    options = {"task": "sentence-embedding", "pooling": pooling, "normalize": False, "num_layers": 4}
    encoder = make(**options, feature_layers=layers, feature_merge=merge)
    encoder.load_state_dict(ours.state_dict())
    for row, vector in enumerate(encoder(*arguments)["sentence_embedding"]):
        tokens = wanted[merge][row, kept[row]]
        assert_close(vector, tokens.mean(0) if pooling == "mean" else tokens[0], atol=1e-10, rtol=0)
    names = {graph.name: graph for graph in encoder.config.graphs()}
    assert names["model"].output_tensors()[0].dims == ("batch", wanted[merge].shape[-1])
    assert encoder.config.with_task("feature-extraction").feature_merge == merge
    assert encoder.config.with_task("fill-mask").feature_merge == "concat"


def test_classifier_equals_transformers() -> None:
    """Five classes from the pooled first token."""
    ours, arguments = make(task="text-classification"), batch()
    expected = transformers_twin(ours, BertForSequenceClassification)(*arguments)
    actual = ours(*arguments)
    assert actual.keys() == {"logits"}
    assert_close(actual["logits"], expected.logits, atol=1e-10, rtol=0)


def test_token_classifier_equals_transformers() -> None:
    """Five classes per token."""
    ours, arguments = make(task="token-classification", pooler=False), batch()
    expected, kept = transformers_twin(ours, BertForTokenClassification)(*arguments).logits, arguments[1].bool()
    actual = ours(*arguments)
    assert actual.keys() == {"logits"}
    assert_close(actual["logits"][kept], expected[kept], atol=1e-10, rtol=0)


def test_question_answering_equals_transformers() -> None:
    """Logits of an answer's start and end."""
    ours, arguments = make(task="question-answering", pooler=False, num_classes=2), batch()
    expected, kept = transformers_twin(ours, BertForQuestionAnswering)(*arguments), arguments[1].bool()
    actual = ours(*arguments)
    assert actual.keys() == {"start_logits", "end_logits"}
    for name in actual:
        assert_close(actual[name][kept], expected[name][kept], atol=1e-10, rtol=0)


def test_argument_order() -> None:
    """Ids, mask, types. Other orders give other results, so that a swap shows."""
    model, (ids, mask, types) = make(), batch()
    positional = model(ids, mask, types)["pooler_output"]
    named = model(token_type_ids=types, attention_mask=mask, input_ids=ids)["pooler_output"]
    assert positional.equal(named)
    assert (model(ids, types, mask)["pooler_output"] - positional).abs().max() > 1e-3
    assert model(ids)["pooler_output"].equal(model(ids, torch.ones_like(ids), 0 * ids)["pooler_output"])


def test_padding_changes_nothing() -> None:
    """A sequence has the same outputs alone and padded in a batch, with any padding token."""
    model, (ids, mask, types) = make(), batch()
    for filler in (0, 7):
        outputs = model(ids.masked_fill(mask == 0, filler), mask, types)
        for row, length in enumerate(LENGTHS):
            alone = model(ids[row : row + 1, :length], None, types[row : row + 1, :length])
            hidden = outputs["last_hidden_state"][row, :length]
            assert_close(hidden, alone["last_hidden_state"][0], atol=1e-11, rtol=0)
            assert_close(outputs["pooler_output"][row], alone["pooler_output"][0], atol=1e-11, rtol=0)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_embedding(pooling: str, normalize: bool) -> None:
    """Mean or first of each row's tokens, from transformers' hidden states; optionally of unit length."""
    ours = make(task="sentence-embedding", pooling=pooling, normalize=normalize)
    arguments = batch()
    hidden = transformers_twin(ours, BertModel)(*arguments).last_hidden_state
    actual = ours(*arguments)
    assert actual.keys() == {"sentence_embedding", "last_hidden_state"}
    for row, length in enumerate(LENGTHS):
        vector = sum(hidden[row, t] for t in range(length)) / length if pooling == "mean" else hidden[row, 0]
        if normalize:
            vector = vector / vector.square().sum().sqrt()
        assert_close(actual["sentence_embedding"][row], vector, atol=1e-10, rtol=0)


def test_row_of_padding_stays_finite() -> None:
    """Its sentence embedding is 0, and other rows are not affected."""
    model, (ids, mask, types) = make(task="sentence-embedding"), batch()
    expected = model(ids, mask, types)["sentence_embedding"]
    mask[2] = 0
    outputs = model(ids, mask, types)
    assert outputs["last_hidden_state"].isfinite().all()
    assert not outputs["sentence_embedding"][2].any()
    assert_close(outputs["sentence_embedding"][:2], expected[:2], atol=1e-12, rtol=0)


def test_outputs_without_the_pooler() -> None:
    """Only the hidden states."""
    model = make(pooler=False)
    assert model(*batch()).keys() == {"last_hidden_state"}
    assert model.pooler is None


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_classifier_without_a_pooler(pooling: str) -> None:
    """It reads the state of the first token, or the mean over tokens that are not padding."""
    model = make(task="text-classification", pooler=False, pooling=pooling, num_classes=3)
    ids, mask, types = batch()
    trunk = make(pooler=False)
    trunk.load_state_dict({name: value for name, value in model.state_dict().items() if "classifier" not in name})
    states = trunk(ids, mask, types)["last_hidden_state"]
    vectors = torch.stack(
        [row[0] if pooling == "cls" else row[kept.bool()].mean(0) for row, kept in zip(states, mask, strict=True)]
    )
    expected = vectors @ model.classifier.weight.T + model.classifier.bias
    assert_close(model(ids, mask, types)["logits"], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_head_shares_the_token_embedding_unless_untied(tie_embeddings: bool) -> None:
    """The head shares the embedding or not."""
    model = make(task="fill-mask", tie_embeddings=tie_embeddings)
    assert (model.masked_lm.decoder.weight is model.embeddings.token.weight) == tie_embeddings


@each_row(
    ("settings", "message"),
    [
        (["task=pretraining", "pooler=false"], "task 'pretraining' reads the pooler, but pooler is False"),
        (["task=translation"], "task must be one of 'feature-extraction', .*, got 'translation'"),
        (["pooling=median"], "pooling must be one of 'cls', 'mean', 'max', .*, got 'median'"),
        (["num_heads=5"], "hidden_size 64 is not divisible by num_heads 5"),
        (["num_classes=0"], "num_classes must be positive, got 0"),
        (["feature_layers=[3]"], r"feature_layers has 3, which lies outside -3 \.\.\. 2 of num_layers 2"),
        (["feature_layers=[-1,-4]"], r"feature_layers has -4, which lies outside -3 \.\.\. 2 of num_layers 2"),
        (["feature_layers=[one]"], r"feature_layers must be tuple\[int, ...\], got"),
        (
            ["feature_layers=[-1]", "task=fill-mask"],
            r"'feature-extraction' and 'sentence-embedding', but feature_layers is \(-1,\) and the task is 'fill-mask'",
        ),
        (["feature_merge=sum"], "feature_merge is 'sum', but feature_layers is empty"),
        (["feature_merge=max"], "feature_merge must be one of 'concat', 'sum', 'mean', got 'max'"),
        (["dropout=1.0"], r"dropout must lie in \[0, 1\), got 1.0"),
    ],
)
def test_invalid_configurations(settings: list[str], message: str) -> None:
    """Each is rejected with a message that names the values."""
    with pytest.raises(UsageError, match=message):
        registry().resolve("bert-tiny", settings)


def test_pooler_is_required_only_by_its_tasks() -> None:
    """Only pretraining requires a pooler."""
    for task in ("feature-extraction", "sentence-embedding", "fill-mask", "text-classification"):
        assert not registry().resolve("bert-tiny", [f"task={task}", "pooler=false"]).config.pooler


def test_seed_determines_the_weights() -> None:
    """Equal seeds give equal models, different seeds different ones; no weight is beyond 2 x 0.02."""
    spec = registry().resolve("bert-tiny")
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(spec.model_class()(spec.config).state_dict())
    first, again, other = states
    assert all(first[name].equal(again[name]) for name in first)
    weights = [name for name, tensor in first.items() if tensor.ndim == 2]
    assert not any(first[name].equal(other[name]) for name in weights)
    assert max(first[name].abs().max() for name in weights) <= 0.04


def test_dropout_acts_in_training_only() -> None:
    """Two passes in training differ; two in evaluation do not."""
    model, arguments = make(dropout=0.5), batch()
    assert model(*arguments)["pooler_output"].equal(model(*arguments)["pooler_output"])
    model.train()
    assert not model(*arguments)["pooler_output"].equal(model(*arguments)["pooler_output"])
