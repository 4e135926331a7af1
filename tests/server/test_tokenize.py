"""/tokenize and /detokenize."""

from __future__ import annotations

import pytest
from http_server import RunningServer


def test_round_trip(tiny: RunningServer) -> None:
    text = "  two  spaces, é你😀\n"
    answer = tiny.post("/tokenize", {"model": tiny.model, "prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == list(text.encode()) and answer["count"] == len(text.encode())
    assert answer["max_model_len"] == 512
    assert answer["token_strs"][:3] == [" ", " ", "t"] and "bytes:\\xc3" in answer["token_strs"]
    assert tiny.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_conversation(tiny: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for generate, end in ((True, "<|im_end|>\n<|im_start|>assistant\n"), (False, "hi<|im_end|>\n")):
        body = {"messages": messages, "add_generation_prompt": generate}
        tokens = tiny.post("/tokenize", body).json()["tokens"]
        assert tiny.post("/detokenize", {"tokens": tokens}).json()["prompt"].endswith(end)
    skipped = tiny.post("/detokenize", {"tokens": tokens, "skip_special_tokens": True}).json()["prompt"]
    assert skipped == "user\nhi\n"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "a" * 100_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools[0]"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
    ],
)
def test_refused(tiny: RunningServer, path: str, body: dict, param: str) -> None:
    response = tiny.post(path, body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_unknown_model(tiny: RunningServer) -> None:
    assert tiny.post("/tokenize", {"model": "other", "prompt": "a"}).status_code == 404
    assert tiny.post("/detokenize", {"model": "other", "tokens": [1]}).status_code == 404


def test_empty_text(tiny: RunningServer) -> None:
    assert tiny.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
