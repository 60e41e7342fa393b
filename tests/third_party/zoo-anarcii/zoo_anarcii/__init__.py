"""ANARCII's models, as encoder-decoders of zoo: ``zoo import antibody_4_2_128_512.pt --kind anarcii``."""

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_importers():
    return [zoo.Importer(name="anarcii", architecture="transformer", layout="zoo_anarcii.layout:ANARCII")]
