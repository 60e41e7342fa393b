"""Decoding strategies: the task ``decode``."""

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_tasks():
    serves = ("text-generation", "text2text-generation")
    return [zoo.Task(name="decode", run="zoo_decoding.task:Decode", serves=serves)]
