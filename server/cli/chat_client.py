"""A client of a running hexlm server: model names, streamed chat answers, traces; over httpx.

Every failure is a `ChatError` of one line that says what to do. Knows neither terminal nor history.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from server.cli.errors import CliError

Message = dict[str, str]

_CONNECT_S = 5.0
_SILENCE_S = 180.0
"""The server sends keep-alive comments, so a longer silence means that it is gone."""


class ChatError(CliError):
    """The server cannot be talked to, or answered with an error."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """None leaves the choice to the server."""

    model: str
    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the answer; `is_reasoning` tells thoughts from the answer proper."""

    text: str
    is_reasoning: bool = False


class ChatClient:
    """Synchronous, one request at a time. `url` may end with `/v1` or not."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # The server is local: a proxy from the environment would only be in the way.
        self._http = httpx.Client(
            base_url=self._url,
            headers=headers,
            timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Names of the served models, the default one first."""
        with self._translated():
            response = self._http.get("/v1/models")
            _raise_for_error(response)
            return [str(model["id"]) for model in response.json()["data"]]

    def stream(
        self, messages: Sequence[Message], options: ChatOptions
    ) -> Generator[Piece, None, None]:
        """Yield the answer as it comes. Closing the iterator aborts the request."""
        body: dict[str, Any] = {
            "model": options.model,
            "messages": list(messages),
            "stream": True,
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        }
        body = {key: value for key, value in body.items() if value is not None}
        with (
            self._translated(),
            self._http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.is_error:
                response.read()
            _raise_for_error(response)
            for data in _events(response.iter_lines()):
                yield from _pieces(data)

    def trace(self, num_steps: int, timeout_s: float, model: str | None) -> bytes:
        """The document of `GET /debug/trace`."""
        parameters: dict[str, str | int | float] = {"steps": num_steps, "timeout": timeout_s}
        if model is not None:
            parameters["model"] = model
        timeout = httpx.Timeout(timeout_s + _SILENCE_S, connect=_CONNECT_S)
        with self._translated():
            response = self._http.get("/debug/trace", params=parameters, timeout=timeout)
            _raise_for_error(response)
            return response.content

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise ChatError(
                f"no server answers at {self._url}; start one with `hexlm serve`, "
                "or name another with --url"
            ) from None
        except httpx.TimeoutException as error:
            raise ChatError(f"the server at {self._url} does not answer any more") from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ChatError(f"{self._url!r} is not a URL such as http://127.0.0.1:8000") from error
        except httpx.HTTPError as error:
            raise ChatError(f"the connection to {self._url} broke: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ChatError(f"what answers at {self._url} is not an OpenAI API") from error


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of each SSE `data:` line up to `[DONE]`; comments are keep-alives."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def _pieces(event: dict[str, Any]) -> Iterator[Piece]:
    if "error" in event:
        raise ChatError(_one_line(event["error"].get("message", "unknown error")))
    for choice in event.get("choices", []):
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning_content"):
            yield Piece(reasoning, is_reasoning=True)
        if content := delta.get("content"):
            yield Piece(content)


def _raise_for_error(response: httpx.Response) -> None:
    if not response.is_error:
        return
    message = str(response.json()["error"]["message"])
    retry = response.headers.get("retry-after")
    hint = f" Try again in {retry} s." if retry and response.status_code == 503 else ""
    if response.status_code == 401:
        hint = " Give the key with --api-key."
    raise ChatError(_one_line(message) + hint)


def _one_line(text: str) -> str:
    return " ".join(text.split())
