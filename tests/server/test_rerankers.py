"""/v1/score and /v1/rerank by models that judge pairs of texts, against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from chain_model import ChainTokenizer
from http_server import RunningServer, running_server
from tiny_models import BASE, FAMILIES
from twofold.engine.model_config import load_model_config
from twofold.engine.sources import resolve_model
from twofold.errors import UnsupportedError
from twofold.server.config import ServerConfig
from twofold.server.state import ServerState, choose_reranker

QUERY = "what is a cat {}"
DOCUMENTS = ["A cat is a small animal.", "Bread is baked.", "", "cat " * 30]


def build_classifier(folder: Path, family: str, num_labels: int = 1) -> Path:
    """A random decoder with a classifier's head, and transformers' files of it."""
    config_class, options = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**BASE, **options, "num_labels": num_labels, "pad_token_id": 0})
    torch.manual_seed(3)
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        model.score.weight.normal_(0.0, 0.5)
    model.save_pretrained(folder)
    ChainTokenizer(specials=["<|im_start|>", "<|im_end|>"]).save(folder, None)
    return folder


def expected_labels(folder: Path, pairs: list[tuple[str, str]]) -> np.ndarray:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = [model(torch.tensor([tokenizer(*pair)["input_ids"]])).logits[0, 0] for pair in pairs]
    return torch.sigmoid(torch.stack(logits).double()).numpy()


def scores(server: RunningServer, first: Any, second: Any, **fields: Any) -> np.ndarray:
    body = {"model": server.model, "text_1": first, "text_2": second, **fields}
    answer = server.post("/v1/score", body)
    assert answer.status_code == 200, answer.text
    return np.array([item["score"] for item in answer.json()["data"]])


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def classifier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = build_classifier(tmp_path_factory.mktemp("classifier"), request.param)
    with running_server(folder, num_threads=1, max_num_batched_tokens=64, max_num_seqs=4) as server:
        yield server


def test_classifier(classifier: RunningServer) -> None:
    folder = Path(classifier.client.config.model)
    pairs = [(QUERY, document) for document in DOCUMENTS]
    expected = expected_labels(folder, pairs)
    assert expected.std() > 0.01, "the texts must differ for the test to say anything"
    np.testing.assert_allclose(scores(classifier, QUERY, DOCUMENTS), expected, atol=1e-5)
    both = [(f"q{index}", document) for index, document in enumerate(DOCUMENTS)]
    found = scores(classifier, [query for query, _ in both], [document for _, document in both])
    np.testing.assert_allclose(found, expected_labels(folder, both), atol=1e-5)
    body = {"model": classifier.model, "query": QUERY, "documents": DOCUMENTS, "top_n": 3}
    answer = classifier.post("/v1/rerank", body).json()
    assert [item["index"] for item in answer["results"]] == np.argsort(-expected)[:3].tolist()
    assert [item["relevance_score"] for item in answer["results"]] == pytest.approx(
        sorted(expected)[::-1][:3], abs=1e-5
    )
    assert answer["usage"]["prompt_tokens"] == sum(len((query + text).encode()) for query, text in pairs)
    classifier.wait_idle()


def test_a_classifier_generates_nothing(classifier: RunningServer) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {})):
        response = classifier.post(
            path, {"model": classifier.model, "messages": [{"role": "user", "content": "x"}], **body}
        )
        assert response.status_code == 400
    assert "classifier" in classifier.post("/v1/completions", {"model": classifier.model, "prompt": "x"}).text


def test_what_cannot_be_scored(classifier: RunningServer) -> None:
    for fields, param in (
        ({"text_2": "x" * 10000}, "text_2"),
        ({"text_1": "y" * 10000}, "text_1"),
        ({"text_2": ["x"] * 2049}, "text_1"),
        ({"instruction": "Find cats"}, "instruction"),
    ):
        response = classifier.post("/v1/score", {"model": classifier.model, "text_1": "a", "text_2": "b", **fields})
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_several_labels_are_no_score(tmp_path: Path) -> None:
    folder = build_classifier(tmp_path, "llama", num_labels=3)
    assert load_model_config(resolve_model(str(folder))).num_labels == 3
    with running_server(folder, num_threads=1) as server:
        response = server.post("/v1/score", {"model": server.model, "text_1": "a", "text_2": "b"})
        assert response.status_code == 400 and "3 labels" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def judge(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A language model whose tokenizer has the two answers as tokens, under a name that says what it is."""
    folder = tmp_path_factory.mktemp("models") / "Qwen3-Reranker-tiny"
    shutil.copytree(tiny_model("qwen3", max_position_embeddings=1024), folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.add_tokens(["yes", "no"]) == 2
    tokenizer.save_pretrained(folder)
    with running_server(folder, num_threads=1, max_num_batched_tokens=256, max_num_seqs=4) as server:
        yield server


def expected_answers(folder: Path, query: str, documents: list[str], instruction: str) -> np.ndarray:
    """As the model card computes it: prefix, pair and suffix as tokens, then yes against no at the last place."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    found = []
    for document in documents:
        pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = [token for part in (prefix, pair, suffix) for token in tokenizer.encode(part, add_special_tokens=False)]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        answers = torch.stack([logits[tokenizer.convert_tokens_to_ids(word)] for word in ("no", "yes")])
        found.append(torch.log_softmax(answers, dim=0)[1].exp().item())
    return np.array(found)


def test_yes_or_no(judge: RunningServer) -> None:
    folder = Path(judge.client.config.model)
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    expected = expected_answers(folder, QUERY, DOCUMENTS, instruction)
    assert expected.std() > 0.01
    np.testing.assert_allclose(scores(judge, QUERY, DOCUMENTS), expected, atol=1e-5)
    other = expected_answers(folder, QUERY, DOCUMENTS, "Find cats")
    np.testing.assert_allclose(scores(judge, QUERY, DOCUMENTS, instruction="Find cats"), other, atol=1e-5)
    assert judge.complete("x", max_tokens=2)["choices"], "it still answers prompts"
    embedded = judge.post("/v1/embeddings", {"model": judge.model, "input": "x"})
    assert embedded.status_code == 200


def test_answers_of_several_tokens(tiny_model: Callable[..., Path]) -> None:
    with running_server(tiny_model("llama"), server={"reranker": "qwen3"}, num_threads=1) as server:
        response = server.post("/v1/score", {"model": server.model, "text_1": "a", "text_2": "b"})
        assert response.status_code == 400 and "'yes'" in response.json()["error"]["message"]


def test_the_reranker_of_a_name() -> None:
    assert choose_reranker("auto", "Qwen/Qwen3-Reranker-0.6B") == "qwen3"
    assert choose_reranker("auto", "Qwen/Qwen3-0.6B") is None and choose_reranker("qwen3", "x") == "qwen3"
    assert choose_reranker("none", "Qwen/Qwen3-Reranker-0.6B") is None
    assert ServerState(ServerConfig()).reranker is None


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "XLMRobertaForSequenceClassification"])
def test_encoders_are_refused(tmp_path: Path, architecture: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "bert"}))
    with pytest.raises(UnsupportedError, match="both directions"):
        load_model_config(resolve_model(str(tmp_path)))
