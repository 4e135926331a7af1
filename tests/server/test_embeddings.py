"""/v1/embeddings, /v1/score and /v1/rerank against transformers' hidden states."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from http_server import RunningServer
from transformers import AutoModel, AutoTokenizer
from twofold.engine.config import EngineConfig
from twofold.engine.core.engine_core import EngineCore

TEXTS = ["hello there", "a much longer text that takes several steps of the engine to compute, all of it", "x"]


@pytest.fixture(scope="module")
def hidden(tiny_model: Callable[..., Path]) -> Callable[[str], np.ndarray]:
    """float64 [T,K]: the hidden states of a text after the last norm."""
    folder = tiny_model("llama")
    model, tokenizer = AutoModel.from_pretrained(folder).double(), AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def compute(text: str) -> np.ndarray:
        return model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].numpy()

    return compute


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def post(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    response = server.post(path, {"model": server.model, **body})
    assert response.status_code == 200, response.text
    return response.json()


def vectors(server: RunningServer, **body: Any) -> np.ndarray:
    return np.array([item["embedding"] for item in post(server, "/v1/embeddings", **body)["data"]])


def test_official_client(tiny: RunningServer, hidden: Callable[[str], np.ndarray]) -> None:
    """The client asks for base64 and decodes it."""
    answer = tiny.openai.embeddings.create(model=tiny.model, input=TEXTS)
    assert [item.index for item in answer.data] == [0, 1, 2] and answer.object == "list"
    for item, text in zip(answer.data, TEXTS, strict=True):
        np.testing.assert_allclose(item.embedding, unit(hidden(text)[-1]), atol=2e-5)
    assert answer.usage.prompt_tokens == sum(len(hidden(text)) for text in TEXTS)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_poolings(tiny: RunningServer, hidden: Callable[[str], np.ndarray], pooling: str) -> None:
    found = vectors(tiny, input=TEXTS, pooling=pooling, normalize=False)
    for row, text in zip(found, TEXTS, strict=True):
        states = hidden(text)
        wanted = {"last": states[-1], "mean": states.mean(axis=0), "cls": states[0]}[pooling]
        np.testing.assert_allclose(row, wanted, rtol=2e-4, atol=2e-5)
    again = vectors(tiny, input=TEXTS, pooling=pooling, normalize=False)
    np.testing.assert_allclose(again, found, rtol=1e-4, atol=1e-5)


def test_dimensions_and_formats(tiny: RunningServer, hidden: Callable[[str], np.ndarray]) -> None:
    wanted = unit(hidden("hello there")[-1][:8])
    np.testing.assert_allclose(vectors(tiny, input="hello there", dimensions=8)[0], wanted, atol=2e-5)
    text = post(tiny, "/v1/embeddings", input="hello there", dimensions=8, encoding_format="base64")["data"][0]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(text["embedding"]), "<f4"), wanted, atol=2e-5)


def test_token_ids(tiny: RunningServer) -> None:
    ids = tiny.post("/tokenize", {"prompt": "hello there"}).json()["tokens"]
    wanted = vectors(tiny, input="hello there")
    np.testing.assert_allclose(vectors(tiny, input=ids), wanted, atol=1e-6)
    np.testing.assert_allclose(vectors(tiny, input=[ids, ids]), np.repeat(wanted, 2, axis=0), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [999999]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 100000}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a b " * 5000}, "input"),
    ],
)
def test_refused(tiny: RunningServer, body: dict[str, Any], param: str) -> None:
    response = tiny.post("/v1/embeddings", {"model": tiny.model, **body})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_score(tiny: RunningServer, hidden: Callable[[str], np.ndarray]) -> None:
    ends = [unit(hidden(text)[-1]) for text in TEXTS]
    one = post(tiny, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)
    np.testing.assert_allclose([item["score"] for item in one["data"]], [ends[0] @ end for end in ends], atol=1e-5)
    pairs = post(tiny, "/v1/score", text_1=TEXTS, text_2=TEXTS[::-1])
    wanted = [first @ second for first, second in zip(ends, ends[::-1], strict=True)]
    np.testing.assert_allclose([item["score"] for item in pairs["data"]], wanted, atol=1e-5)
    wrong = tiny.post("/v1/score", {"model": tiny.model, "text_1": ["a", "b"], "text_2": ["c"]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "text_1"


def test_rerank(tiny: RunningServer, hidden: Callable[[str], np.ndarray]) -> None:
    ends = [unit(hidden(text)[-1]) for text in TEXTS]
    scores = [ends[2] @ end for end in ends]
    answer = post(tiny, "/v1/rerank", query=TEXTS[2], documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]])
    order = [result["index"] for result in answer["results"]]
    assert order == sorted(range(3), key=lambda index: -scores[index]) and order[0] == 2
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-5)
        assert result["document"]["text"] == TEXTS[result["index"]]
    best = post(tiny, "/v1/rerank", query=TEXTS[2], documents=TEXTS, top_n=1, return_documents=False)["results"]
    assert len(best) == 1 and set(best[0]) == {"index", "relevance_score"}


def test_nothing_is_left(tiny: RunningServer) -> None:
    vectors(tiny, input=TEXTS, pooling="mean")
    tiny.wait_idle()


def test_the_models_own_pooling(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    modules = [{"type": "t.Transformer", "path": ""}, {"type": "t.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    info = EngineCore(EngineConfig(model=str(folder), num_threads=1, device="cpu")).info()
    assert (info.pooling, info.normalize, info.pooling_error, info.hidden_size) == ("mean", False, None, 64)
