"""Recurrent encoder-decoders, with or without attention."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="seq2seq",
            tasks=("text2text-generation",),
            config="zoo_plugins.seq2seq.config:Seq2SeqConfig",
            model="zoo_plugins.seq2seq.model:Seq2Seq",
            reference="Bahdanau et al. 2015, Neural Machine Translation by Jointly Learning to Align and Translate",
        )
    ]
