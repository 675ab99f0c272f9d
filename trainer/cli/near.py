"""Commands and choices of click that name what a mistyped word may mean. Imports no torch."""

from typing import Any

import click


class NearGroup(click.Group):
    """A group of commands whose message about an unknown one names those that are near."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, known = args[0], self.list_commands(ctx)
        if name[:1].isalnum() and name not in known and not ctx.resilient_parsing:
            ctx.fail(f"No such command '{name}'{_hint(name, known) or '.'}")
        return super().resolve_command(ctx, args)


class NearChoice(click.Choice[str]):
    """A choice whose message about another value names those that are near."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        known = list(map(str, self.choices))
        if value in known:
            return str(value)
        allowed = ", ".join(f"'{each}'" for each in known)
        return self.fail(f"'{value}' is not one of {allowed}{_hint(str(value), known)}", param, ctx)


def _hint(given: str, known: list[str]) -> str:
    from trainer.text.near import did_you_mean  # rarely needed

    return did_you_mean(given, known)
