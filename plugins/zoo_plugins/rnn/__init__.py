"""Recurrent classifiers of texts and tokens."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="rnn",
            tasks=("text-classification", "token-classification"),
            config="zoo_plugins.rnn.config:RNNConfig",
            model="zoo_plugins.rnn.model:RNN",
            reference="Graves and Schmidhuber 2005, Framewise Phoneme Classification with Bidirectional LSTM",
        )
    ]
