"""The verb `chat`: talk to a running server in the terminal, or ask it one thing from a script.

Keeps the history; Ctrl-C stops the answer and not the program. Knows the terminal, not HTTP.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from server.cli.errors import CliError

if TYPE_CHECKING:
    from server.cli.chat_client import ChatClient, ChatOptions, Message, Piece

_HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer."

# A model's answer must not be able to drive the terminal: no escape sequences, no control codes.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@dataclass
class Conversation:
    """The messages so far. `system` stays first, also after a reset."""

    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Keep an answer, a partial one too; a question without any is taken back."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="Ask this once and exit; piped input is added to it.")
    ] = None,
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the server's first.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    api_key: Annotated[str | None, typer.Option(help="If the server wants one.")] = None,
) -> None:
    """Talk to a running server. With a prompt or piped input: answer once and exit."""
    from server.cli.chat_client import ChatClient, ChatOptions

    piped = None if sys.stdin.isatty() else sys.stdin.read()
    question = "\n\n".join(part for part in (prompt, piped) if part and part.strip())
    with closing(ChatClient(url, api_key)) as client:
        name = model or _first_model(client)
        options = ChatOptions(name, temperature, max_tokens)
        talk = Talk(client, options, Conversation(system), Console(highlight=False))
        if question:
            talk.once(question)
        elif piped is not None:
            raise CliError("nothing to ask: the piped input is empty and no prompt was given")
        else:
            talk.repeatedly()


def _first_model(client: ChatClient) -> str:
    models = client.models()
    if not models:
        raise CliError("the server serves no model; start it with `hexlm serve --model NAME`")
    return models[0]


class Talk:
    """One conversation in one terminal."""

    def __init__(
        self,
        client: ChatClient,
        options: ChatOptions,
        conversation: Conversation,
        console: Console,
    ) -> None:
        self._client = client
        self._options = options
        self._conversation = conversation
        self._console = console

    def once(self, question: str) -> None:
        """Print the answer to `question` alone; raises ChatError."""
        self._answer(question)

    def repeatedly(self) -> None:
        """Ask and answer until /exit or the end of input. An error ends an answer only."""
        from server.cli.chat_client import ChatError

        self._console.print(f"{self._options.model}. {_HELP}", markup=False, style="dim")
        while (line := self._read_line()) is not None:
            if line.startswith("/"):
                self._command(line)
            elif line:
                try:
                    self._answer(line)
                except ChatError as error:
                    self._console.print(f"error: {error}", markup=False, style="red")

    def _read_line(self) -> str | None:
        """One line without the spaces around it; None at the end of input or at /exit."""
        while True:
            try:
                line = self._console.input("[bold]> [/bold]").strip()
            except EOFError:
                self._console.print()
                return None
            except KeyboardInterrupt:
                self._console.print("\n/exit leaves.", style="dim")
                continue
            return None if line in ("/exit", "/quit") else line

    def _command(self, line: str) -> None:
        if line == "/reset":
            self._conversation.reset()
            self._console.print("The conversation starts anew.", style="dim")
        else:
            self._console.print(_HELP, style="dim", markup=False)

    def _answer(self, question: str) -> None:
        self._conversation.ask(question)
        kept: list[str] = []
        try:
            with closing(self._pieces()) as pieces:
                for piece in pieces:
                    self._show(piece)
                    if not piece.is_reasoning:
                        kept.append(piece.text)
        except KeyboardInterrupt:
            self._console.print(" (stopped)", style="dim", end="")
        finally:
            self._console.print()
            self._conversation.answer("".join(kept))

    def _pieces(self) -> Generator[Piece, None, None]:
        return self._client.stream(self._conversation.messages, self._options)

    def _show(self, piece: Piece) -> None:
        self._console.print(
            piece.text.translate(_CONTROLS),
            end="",
            markup=False,
            soft_wrap=True,
            style="dim" if piece.is_reasoning else None,
        )
