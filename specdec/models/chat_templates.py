"""Chat templates that ship, and those of a file, in place of a tokenizer's own."""

from __future__ import annotations

import copy
from importlib.resources import files
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, first_line, shown

__all__ = ["chat_template_names", "with_chat_template"]

_FOLDER = "assets/chat_templates"


def chat_template_names() -> list[str]:
    """Names of the templates that ship."""
    return sorted(one.name.removesuffix(".jinja") for one in (files("specdec") / _FOLDER).iterdir())


def with_chat_template(tokenizer: Any, template: str | Path) -> Any:
    """A copy of a tokenizer with another chat template.

    Args:
        tokenizer: a tokenizer of transformers.
        template: the name of one that ships, or a file that holds one.

    Raises:
        ConfigError: there is no such template, or it is none.
    """
    names = chat_template_names()
    try:
        path = files("specdec") / _FOLDER / f"{template}.jinja" if template in names else Path(template)
        text = path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"chat_template is {shown(str(template))}, which cannot be read: {first_line(error)}; give a file, or one "
            f"of {', '.join(names)}"
        ) from error
    from jinja2 import TemplateSyntaxError  # which only chats need

    other = copy.deepcopy(tokenizer)
    other.chat_template = text
    try:
        other.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"chat_template is {shown(str(template))}, which is no template: {first_line(error)}; mend its line "
            f"{error.lineno}"
        ) from error
    except Exception:  # it may refuse such a chat: messages are checked when there are some
        pass
    return other
