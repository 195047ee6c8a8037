"""Chat templates: a list of messages to the prompt text a model was trained on, in a sandbox with budgets.

A template comes with the checkpoint, so it may be slow or hostile: loops, calls, text and time are bounded.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moesaic.errors import CheckpointError, RequestError
from moesaic.text.files import read_json, read_text

MAX_TEMPLATE_CHARS = 1 << 20
# guess: a thousand messages through the longest of the public templates take under a tenth of each.
MAX_STEPS = 1_000_000  # loop rounds and calls
MAX_CHARS = 1 << 24  # of every text that the template makes on its way
MAX_SECONDS = 5.0
MAX_WIDTH = 10_000  # of a padded or indented text
_WIDE_FORMAT = re.compile(r"[%:][^A-Za-z%{}]*?(?:[0-9]{5,}|\*)")
Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled chat template. Thread-safe."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "the chat template",
    ) -> None:
        """Compile a template; `special_tokens` (`bos_token` and the like) become its variables.

        `name` is what errors call it.

        Raises: CheckpointError when it is too long or no valid Jinja.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(
                f"{name} has {len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}: shorten it"
            )
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _ENVIRONMENT.from_string(_with_meters(_ENVIRONMENT.parse(source)))
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"{name} is not valid Jinja: {error.message} (line {error.lineno}); correct it, or copy the "
                "model's file again"
            ) from error
        except RecursionError as error:
            raise CheckpointError(f"{name} is nested too deeply: correct it") from error

    @classmethod
    def load(
        cls, folder: str | Path, *, special_tokens: Mapping[str, str] | None = None
    ) -> ChatTemplate | None:
        """The chat template of a checkpoint folder; None when it has none.

        A file chat_template.jinja wins over `chat_template` in tokenizer_config.json, which is a string or a
        list of named ones, of which `default` is taken.

        Raises: CheckpointError when there is one that cannot be used.
        """
        folder = Path(folder)
        path = folder / "chat_template.jinja"
        source: Any
        if path.is_file():
            source = read_text(path)
        else:
            path = folder / "tokenizer_config.json"
            source = read_json(path).get("chat_template")
        if isinstance(source, list):
            named = {
                str(entry.get("name")): entry.get("template") for entry in source if isinstance(entry, dict)
            }
            source = named.get("default")
            if source is None:
                raise CheckpointError(
                    f"{path}: chat_template has no entry named default, only {sorted(named)}: put the one to "
                    "use into chat_template.jinja"
                )
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointError(
                f"{path}: chat_template must be a string or a list, got {type(source).__name__}"
            )
        return cls(source, special_tokens=special_tokens, name=f"the chat template in {path}")

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation, special tokens written out.

        With `continue_final_message` the text stops where the last message's content does, so that the model
        goes on with it. `variables` reach the template by name.

        Raises: RequestError when the template refuses the messages, fails on them, or exceeds a budget.
        """
        tag = ""
        if continue_final_message:
            messages, tag = _with_tag(messages)
        names = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        token = _BUDGET.set(_Budget())
        try:
            text = self._template.render(names)
        except RequestError:
            raise
        except _Refused as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        except (TemplateError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise RequestError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error
        except (RecursionError, MemoryError) as error:
            raise RequestError(
                f"the chat template does not end on these messages: {type(error).__name__}", param="messages"
            ) from error
        finally:
            _BUDGET.reset(token)
        return _cut_at_tag(text, tag) if tag else text


def _with_tag(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """Mark the end of the last content with a text that nothing else can hold."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise RequestError("continue_final_message needs a last message with text content", param="messages")
    tag = f"moesaic{secrets.token_hex(16)}"
    return [*messages[:-1], {**messages[-1], "content": content + tag + " "}], tag


def _cut_at_tag(text: str, tag: str) -> str:
    head, found, tail = text.rpartition(tag)
    if not found:
        raise RequestError(
            "the chat template drops the last message: it cannot be continued", param="messages"
        )
    # The space after the tag is gone when the template trims contents; then the content's end is trimmed too.
    return head if tail.startswith(" ") else head.rstrip()


class _Refused(Exception):
    """The template called raise_exception."""


class _Budget:
    """What one rendering has used."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_chars = 0
        self.until = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Count one loop round or call."""
        self.num_steps += 1
        if self.num_steps > MAX_STEPS:
            raise _over(f"took more than {MAX_STEPS} steps")
        if not self.num_steps % 64 and time.monotonic() > self.until:
            raise _over(f"ran for more than {MAX_SECONDS:g} s")

    def text(self, num_chars: int) -> None:
        """Count text before it is made."""
        self.num_chars += num_chars
        if self.num_chars > MAX_CHARS:
            raise _over(f"made more than {MAX_CHARS} characters")


_BUDGET: ContextVar[_Budget] = ContextVar("chat_template_budget")


class _Metered:
    """An iterable of a `for` loop that counts its rounds."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        budget = _BUDGET.get()
        for item in self._items:
            budget.step()
            yield item

    def __len__(self) -> int:
        return len(self._items)


def _with_meters(tree: nodes.Template) -> nodes.Template:
    """Put a meter on every loop and every part of a concatenation."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = nodes.Filter(loop.iter, "metered", [], [], None, None, lineno=loop.lineno)
    for joined in list(tree.find_all(nodes.Concat)):
        joined.nodes = [nodes.Filter(n, "counted", [], [], None, None, lineno=n.lineno) for n in joined.nodes]
    return tree.set_environment(_ENVIRONMENT)  # type: ignore[return-value]


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which every call, printed value and growing operation is counted."""

    intercepted_binops = frozenset(["+", "*", "%", "**"])

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call something from a template: macros, methods, globals."""
        _BUDGET.get().step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_growth(getattr(__obj, "__name__", ""), owner, args)
        return _counted(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandboxed form of a text's `format` method, its widths checked."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators by which a few characters of template make gigabytes."""
        budget = _BUDGET.get()
        budget.step()
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
            raise _over(f"takes a power of {right!r}")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        for text, other in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple):
                budget.text(
                    len(text) * max(other, 0) if operator == "*" and isinstance(other, int) else len(text)
                )
        return super().call_binop(context, operator, left, right)


def _metered_filter(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts its call and its text; `wraps` keeps the marks by which Jinja passes context."""
    value_idx = 1 if hasattr(plain, "jinja_pass_arg") else 0

    @wraps(plain)
    def metered(*args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().step()
        _check_growth(name, args[value_idx], (*args[value_idx + 1 :], *kwargs.values()))
        return _counted(plain(*args, **kwargs))

    return metered


def _counted(value: Any) -> Any:
    """Count a text on its way into another one."""
    if isinstance(value, str):
        _BUDGET.get().text(len(value))
    return value


def _check_growth(name: str, value: Any, args: Sequence[Any]) -> None:
    """Count what a filter or a method of a text will make, where that can be far more than it is given."""
    for arg in args:
        if isinstance(arg, int) and abs(arg) > MAX_WIDTH:
            raise _over(f"passes the number {arg} to {name}")
    if name == "format" and isinstance(value, str):
        _check_format(value)
    if name == "replace" and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        _BUDGET.get().text(str(value).count(old) * len(new))
    if name == "join" and isinstance(value, str) and args and hasattr(args[0], "__len__"):
        _BUDGET.get().text(len(value) * len(args[0]))
    if name == "join" and not isinstance(value, str) and args and hasattr(value, "__len__"):
        _BUDGET.get().text(len(value) * len(str(args[0])))


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise _over(f"formats with the width of {text[:80]!r}")


def _over(what: str) -> RequestError:
    return RequestError(f"the chat template {what}: that is beyond its budget", param="messages")


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are the library's

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The node of one block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return str(caller())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, without the HTML escapes of Jinja's own filter."""
    if isinstance(value, Undefined):
        raise TypeError(f"{value._undefined_name!r} is undefined and has no JSON")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(format_text: str) -> str:
    return datetime.now().strftime(format_text)


def _build_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        finalize=_counted,
        cache_size=0,
    )
    environment.filters["tojson"] = _to_json
    environment.filters = {name: _metered_filter(name, plain) for name, plain in environment.filters.items()}
    environment.filters.update(metered=_Metered, counted=_counted)
    del environment.globals["lipsum"]
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_ENVIRONMENT = _build_environment()
