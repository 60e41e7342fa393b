"""Imports ANARCII's models as encoder-decoders: ``zoo import antibody_4_2_128_512.pt --model-type anarcii``."""

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_importers():
    return [zoo.Importer(name="anarcii", architecture="transformer", layout="zoo_anarcii.layout:ANARCII")]
