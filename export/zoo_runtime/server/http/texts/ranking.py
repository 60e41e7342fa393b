"""Scores of pairs of texts: by a cross-encoder, or as cosines of the vectors of a sentence encoder."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from zoo.artifact.prefixes import read_prefixes
from zoo.errors import ZooError
from zoo_runtime.running.inputs import Pair
from zoo_runtime.server.http.bodies import BodyPart
from zoo_runtime.server.http.observe import FACTS
from zoo_runtime.server.http.openai.bodies import Count, ModelBody
from zoo_runtime.server.http.operations import Operation
from zoo_runtime.server.http.responses import as_json
from zoo_runtime.server.http.service import Service
from zoo_runtime.server.models import Served
from zoo_runtime.server.request_error import RequestError

__all__ = ["RankingRoutes", "Rerank", "Score"]

_EMBEDDING, _CROSS_ENCODER = "sentence-embedding", "rerank"
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")
"""Names of the prompts of queries and documents, as sentence-transformers looks for them."""


class Document(BodyPart):
    """A document."""

    text: str


Documents = Annotated[list[str | Document], Field(min_length=1, fail_fast=True)]
Texts = str | Annotated[list[str], Field(min_length=1, fail_fast=True)]


class Rerank(ModelBody):
    """Body of ``/rerank``: ``documents`` as Cohere, Jina and vLLM have it, or ``texts`` as TEI has it."""

    query: Annotated[str, Field(min_length=1)]
    documents: Documents | None = None
    top_n: Count | None = None
    """Number of documents to return, best first; by default all."""
    return_documents: bool = True
    """Return the text of each document."""
    texts: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    raw_scores: bool = False
    """Return the logit of a cross-encoder as it is."""
    return_text: bool = False
    """Return each of ``texts``."""

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.documents is None) == (self.texts is None):
            raise ValueError("give either documents or texts")
        return self

    @property
    def passages(self) -> list[str]:
        """The texts to rank."""
        given = self.texts if self.texts is not None else self.documents or []
        return [one.text if isinstance(one, Document) else one for one in given]


class Score(ModelBody):
    """Body of ``/score``: one text with each of several, or as many first as second texts."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    """Another name of ``text_1``."""
    documents: Texts | None = None
    """Another name of ``text_2``."""

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.text_1 is None) == (self.queries is None) or (self.text_2 is None) == (self.documents is None):
            raise ValueError("give text_1 and text_2, or queries and documents")
        firsts, seconds = self.sides
        if len(firsts) not in (1, len(seconds)):
            raise ValueError(f"the first texts must be one, or as many as the {len(seconds)} second ones")
        return self

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """The first texts, one or several, and the second ones."""
        first, second = self.text_1 or self.queries or "", self.text_2 or self.documents or ""
        return [first] if isinstance(first, str) else first, [second] if isinstance(second, str) else second


@dataclass(frozen=True)
class _Scores:
    """The scores of pairs, and the number of tokens that the model has read."""

    values: Sequence[float]
    tokens: int


class RankingRoutes:
    """The handlers.

    Args:
        service: the models and limits.
    """

    def __init__(self, service: Service) -> None:
        self.service = service

    def operations(self) -> list[Operation]:
        """Return the routes, each also under ``/v1``, and that of Cohere under ``/v2``."""
        ranking = [
            Operation(
                method="POST",
                path=path,
                handler=self.rerank,
                summary="Rank documents for a query.",
                body=Rerank,
                answers={"application/json": {"type": ["object", "array"]}},
            )
            for path in ("/rerank", "/v1/rerank", "/v2/rerank")
        ]
        scoring = [
            Operation(method="POST", path=path, handler=self.score, summary="Score pairs of texts.", body=Score)
            for path in ("/score", "/v1/score")
        ]
        return ranking + scoring

    async def rerank(self, request: Request) -> Response:
        """``/rerank``."""
        body = await self.service.read_json(request, Rerank)
        served = self.service.find(request, body.model)
        passages, is_tei = body.passages, body.texts is not None
        self.service.note_texts(request, input=[body.query, *passages])
        names = (_QUERY, _DOCUMENT)
        param = "texts" if is_tei else "documents"
        scores = await self._scores(request, served, [body.query], passages, names, param, raw=body.raw_scores)
        order = np.argsort(-np.asarray(scores.values), kind="stable")[: body.top_n].tolist()
        if is_tei:
            found = [{"index": at, "score": scores.values[at]} for at in order]
            return as_json([one | {"text": passages[one["index"]]} for one in found] if body.return_text else found)
        results = [{"index": at, "relevance_score": scores.values[at]} for at in order]
        if body.return_documents:
            results = [one | {"document": {"text": passages[one["index"]]}} for one in results]
        facts = {"id": f"rerank-{secrets.token_hex(12)}", "model": served.name, "results": results}
        return as_json(facts | {"usage": _usage(scores)})

    async def score(self, request: Request) -> Response:
        """``/score``."""
        body = await self.service.read_json(request, Score)
        served = self.service.find(request, body.model)
        firsts, seconds = body.sides
        self.service.note_texts(request, input=[*firsts, *seconds])
        param = "text_2" if body.documents is None else "documents"
        scores = await self._scores(request, served, firsts, seconds, ((), ()), param)
        data = [{"index": place, "object": "score", "score": value} for place, value in enumerate(scores.values)]
        facts = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        return as_json(facts | {"model": served.name, "data": data, "usage": _usage(scores)})

    async def _scores(
        self,
        request: Request,
        served: Served,
        firsts: Sequence[str],
        seconds: Sequence[str],
        prompts: tuple[Sequence[str], Sequence[str]],
        param: str,
        *,
        raw: bool = False,
    ) -> _Scores:
        """Return the scores of pairs, of which the first text is one or one for each second text.

        Args:
            request: the request.
            served: its model.
            firsts: first texts.
            seconds: second texts.
            prompts: names of prompts, the first present of which a sentence encoder puts before first, second texts.
            param: the field of the second texts, for errors.
            raw: return logits of a cross-encoder as they are.
        """
        options = {"function_to_apply": "none"} if raw else {}
        try:
            runner = await run_in_threadpool(served.runner, _CROSS_ENCODER, options)
        except ZooError as error:
            if not served.embeds:
                what = error.what if served.task == "text-classification" else "it scores no pairs of texts"
                problem = f"the model {served.name!r} cannot rank: {what}"
                raise RequestError(400, problem, "wrong_task", "model") from error
            return await self._cosines(request, served, firsts, seconds, prompts, param)
        firsts = [*firsts] * (len(seconds) // len(firsts))
        pairs = [Pair(first, [second]) for first, second in zip(firsts, seconds, strict=True)]
        results = await self.service.answer(request, served, runner, pairs, param)
        values = [result["passages"][0]["score"] for result in results]
        return self._counted(request, values, results)

    async def _cosines(
        self,
        request: Request,
        served: Served,
        firsts: Sequence[str],
        seconds: Sequence[str],
        prompts: tuple[Sequence[str], Sequence[str]],
        param: str,
    ) -> _Scores:
        """Return the cosines of the vectors of pairs: see :meth:`_scores`."""
        known = read_prefixes(served.session.stored).texts
        vectors, results = [], []
        for texts, names in ((firsts, prompts[0]), (seconds, prompts[1])):
            named = next((name for name in names if name in known), None)
            options = {} if named is None else {"task_prefix": named}
            runner = await run_in_threadpool(served.runner, _EMBEDDING, options)
            answers = await self.service.answer(request, served, runner, texts, param)
            rows = np.stack([answer["embedding"] for answer in answers]).astype(np.float64)
            vectors.append(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12))
            results += answers
        return self._counted(request, (vectors[0] * vectors[1]).sum(-1).tolist(), results)

    def _counted(self, request: Request, values: Sequence[float], results: Sequence[Mapping[str, Any]]) -> _Scores:
        tokens = sum(result["tokens"] for result in results)
        request.scope[FACTS]["prompt_tokens"] = tokens
        return _Scores(values, tokens)


def _usage(scores: _Scores) -> dict[str, int]:
    return {"prompt_tokens": scores.tokens, "total_tokens": scores.tokens}
