"""The parser of `hf-hotspa`: a wrong command line is one line that names what was probably meant."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

from hf_hotspa.errors import printable
from hf_hotspa.nearest import meant, spelled, unknown_flag

USAGE_ERROR = 2
_NUMBER = re.compile(r"-\.?[0-9]")


class CommandParser(argparse.ArgumentParser):
    """Reads one command, or the word that names it. Flags may have underscores for dashes, and `hotspa_` in front, as in
    the Trainer's arguments; they may not be abbreviated. An error is one line on stderr and exit code 2."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As `ArgumentParser.parse_known_args`. An unknown flag, or a command that does not exist, ends the program."""
        words = list(sys.argv[1:] if args is None else args)
        commands = next((a for a in self._actions if isinstance(a, argparse._SubParsersAction)), None)
        if commands is None:
            words = [self._known(word) for word in words]
        elif words and not words[0].startswith("-") and words[0] not in commands.choices:
            near = meant(words[0], commands.choices) or f"use one of {', '.join(commands.choices)}"
            self.error(f"there is no command {words[0]}: {near.strip()}")
        return super().parse_known_args(words, namespace)

    def _known(self, word: str) -> str:
        """A flag in the spelling of this parser; other words as they are."""
        name, equals, value = word.partition("=")
        known = self._option_string_actions
        if name in known or not name.startswith("-") or name in ("-", "--") or _NUMBER.match(name):
            return word
        if name[:2] in known:  # the value follows without a space, such as -ofile
            return word
        long = [flag for flag in known if flag.startswith("--")]
        meaning = spelled(name, long) if name.startswith("--") else None
        if meaning is None:
            self.error(unknown_flag(name, [flag[2:] for flag in long]))
        return f"{meaning}{equals}{value}"

    def error(self, message: str) -> NoReturn:
        """Ends the program with code 2."""
        print(f"{self.prog}: {printable(message)} ({self.prog} --help)", file=sys.stderr)
        sys.exit(USAGE_ERROR)


Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"
"""What a command is added to, with `add_parser`."""
