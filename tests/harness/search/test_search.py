"""A search's side that makes no load: its command as it is kept."""

import pytest

from harness.search.search import without_secrets


@pytest.mark.parametrize(
    ("restart", "kept"),
    [
        (
            "docker run -e HF_TOKEN=abc vllm --api-key sk-1 --port 80",
            "docker run -e HF_TOKEN=*** vllm --api-key *** --port 80",
        ),
        ("sh -c 'API_KEY=\"a b\" serve --api-key=c'", "sh -c 'API_KEY=*** serve --api-key=***'"),
        ("curl -H 'Authorization: Bearer abc' URL", "curl -H 'Authorization: Bearer ***' URL"),
        (
            "serve --max-tokens 5 --tokenizer one --trust",
            "serve --max-tokens 5 --tokenizer one --trust",
        ),
    ],
)
def test_no_secret_of_the_restart_command_is_kept(restart: str, kept: str) -> None:
    typed = ["walkaway", "search", f"--restart={restart}", "--minutes", "3"]
    assert without_secrets(typed, restart) == [*typed[:2], f"--restart={kept}", *typed[3:]]


def test_a_command_without_restart_is_kept_as_it_is() -> None:
    assert without_secrets(["walkaway", "search"], None) == ["walkaway", "search"]
