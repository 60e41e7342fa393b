"""Plugin with the built-in tasks and the commands that run exported models."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_tasks() -> Sequence[zoo.Task]:
    home = "zoo_runtime.tasks"
    encoders = ("feature-extraction", "sentence-embedding")
    records, weights = f"{home}.attention.record", f"{home}.attention.weights"
    formulas = f"{home}.formulas"
    texts = (
        *encoders, "fill-mask", "multiple-choice", "pretraining", "question-answering", "replaced-token-detection",
        "text-classification", "text-generation", "text2text-generation", "token-classification",
    )  # fmt: skip
    images = ("image-classification", "image-feature-extraction")
    masked = ("fill-mask", "pretraining")
    pairs = ("zero-shot-image-classification",)
    return [
        zoo.Task(
            name="attentions",
            run=f"{weights}:Attentions",
            serves=texts,
            attention=f"{records}:record_text",
        ),
        zoo.Task(name="attentions", run=f"{weights}:Attentions", serves=pairs),
        zoo.Task(name="audio-classification", run=f"{home}.sounds:AudioClassification", formula=f"{formulas}:classes"),
        zoo.Task(name="augment", run=f"{home}.augment.masked:Augment", serves=masked),
        zoo.Task(name="augment", run=f"{home}.augment.prompted:AugmentByPrompt", serves=("text-generation",)),
        zoo.Task(
            name="ctc-speech-recognition",
            run=f"{home}.sounds:CTCSpeechRecognition",
            formula=f"{formulas}:ctc_transcript",
        ),
        zoo.Task(
            name="depth-estimation",
            run=f"{home}.maps:DepthEstimation",
            formula=f"{home}.image_formulas:depths",
        ),
        zoo.Task(
            name="feature-extraction", run=f"{home}.encoders:Features", serves=encoders, formula=f"{formulas}:features"
        ),
        zoo.Task(name="fill-mask", run=f"{home}.encoders:FillMask", serves=masked, formula=f"{formulas}:masks"),
        zoo.Task(
            name="image-attentions",
            run=f"{weights}:ImageAttentions",
            serves=images,
            attention=f"{records}:record_image",
        ),
        zoo.Task(
            name="image-attentions",
            run=f"{weights}:ImageAttentions",
            serves=pairs,
            attention=f"{records}:record_image_text",
        ),
        zoo.Task(name="image-classification", run=f"{home}.images:ImageClassification", formula=f"{formulas}:classes"),
        zoo.Task(
            name="image-embedding",
            run=f"{home}.contrastive:ImageEmbedding",
            serves=pairs,
            formula=f"{formulas}:image_embedding",
        ),
        zoo.Task(
            name="image-feature-extraction", run=f"{home}.images:ImageFeatures", formula=f"{formulas}:image_features"
        ),
        zoo.Task(
            name="image-text-to-text",
            run=f"{home}.generate.image_texts:ImageTextToText",
            formula=f"{formulas}:greedy",
        ),
        zoo.Task(name="image-to-text", run=f"{home}.generate.pictures:ImageToText", formula=f"{formulas}:greedy"),
        zoo.Task(
            name="multiple-choice", run=f"{home}.candidates:MultipleChoice", formula=f"{formulas}:multiple_choice"
        ),
        zoo.Task(
            name="next-sentence",
            run=f"{home}.classification:NextSentence",
            serves=("pretraining",),
            formula=f"{formulas}:next_sentence",
        ),
        zoo.Task(
            name="next-token",
            run=f"{home}.likelihood:NextToken",
            serves=("text-generation",),
            formula=f"{formulas}:next_token",
        ),
        zoo.Task(
            name="object-detection",
            run=f"{home}.detection:ObjectDetection",
            formula=f"{home}.image_formulas:objects",
        ),
        zoo.Task(name="pretraining", run=f"{home}.encoders:FillMask", formula=f"{formulas}:masks"),
        zoo.Task(name="question-answering", run=f"{home}.questions:QuestionAnswering", formula=f"{formulas}:spans"),
        zoo.Task(
            name="replaced-token-detection",
            run=f"{home}.encoders:ReplacedTokens",
            formula=f"{formulas}:replaced_tokens",
        ),
        zoo.Task(
            name="rerank",
            run=f"{home}.candidates:Rerank",
            serves=("text-classification",),
            formula=f"{formulas}:rerank",
        ),
        zoo.Task(
            name="score", run=f"{home}.likelihood:Score", serves=("text-generation",), formula=f"{formulas}:score"
        ),
        zoo.Task(
            name="semantic-segmentation",
            run=f"{home}.maps:SemanticSegmentation",
            formula=f"{home}.image_formulas:segments",
        ),
        zoo.Task(
            name="sentence-embedding",
            run=f"{home}.encoders:Embed",
            serves=(*encoders, *pairs),
            formula=f"{formulas}:embedding",
        ),
        zoo.Task(
            name="sound-attentions",
            run=f"{home}.attention.sound:SoundAttentions",
            serves=("speech-recognition",),
            attention=f"{home}.attention.sound:record_sound",
        ),
        zoo.Task(
            name="speech-recognition",
            run=f"{home}.speech.recognition:SpeechRecognition",
            formula=f"{formulas}:transcript",
        ),
        zoo.Task(name="tensors", run=f"{home}.tensors:Tensors", formula=f"{formulas}:tensors"),
        zoo.Task(
            name="text-classification", run=f"{home}.classification:TextClassification", formula=f"{formulas}:classes"
        ),
        zoo.Task(name="text-generation", run=f"{home}.generate.tasks:Continue", formula=f"{formulas}:greedy"),
        zoo.Task(name="text2text-generation", run=f"{home}.generate.tasks:Translate", formula=f"{formulas}:greedy"),
        zoo.Task(
            name="token-classification", run=f"{home}.entities:TokenClassification", formula=f"{formulas}:token_classes"
        ),
        zoo.Task(
            name="vector-feature-extraction",
            run=f"{home}.vector_features:VectorFeatures",
            formula=f"{formulas}:vector_features",
        ),
        zoo.Task(
            name="zero-shot-classification",
            run=f"{home}.candidates:ZeroShot",
            serves=("text-classification",),
            formula=f"{formulas}:zero_shot",
        ),
        zoo.Task(
            name="zero-shot-image-classification",
            run=f"{home}.contrastive:ZeroShotImages",
            formula=f"{formulas}:zero_shot_images",
        ),
    ]


@zoo.hookimpl
def zoo_commands() -> Sequence[zoo.Command]:
    run = "Run an exported model on text, token ids, images, sound or vectors."
    search = "Find the rows of a file of vectors that are most similar to a text."
    serve = "Answer requests over HTTP with exported models."
    doctor = "Show versions, execution providers and plugins."
    return [
        zoo.Command(name="run", help=run, command="zoo_runtime.cli.run:command", section="Use"),
        zoo.Command(name="search", help=search, command="zoo_runtime.cli.search:command", section="Use"),
        zoo.Command(name="serve", help=serve, command="zoo_runtime.cli.serve:command", section="Use"),
        zoo.Command(name="doctor", help=doctor, command="zoo_runtime.cli.doctor:command", section="Inspect and extend"),
    ]


@zoo.hookimpl
def zoo_engines() -> Sequence[zoo.Engine]:
    return [
        zoo.Engine(name="local", run="zoo_runtime.batch.local:run"),
        zoo.Engine(name="ray", run="zoo_runtime.batch.ray_engine:run"),
    ]
