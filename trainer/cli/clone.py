"""The command `clipship clone`: the job file of a run, to change and to start again. Imports no torch."""

from pathlib import Path

import click
import tomli_w

from trainer.cli.options import Command, run_argument, set_of
from trainer.errors import InputError
from trainer.presets.files import schema_line, write_job_file
from trainer.run.layout import JOB_FILE
from trainer.text.paste import command as paste
from trainer.text.terminal import one_line, say


@click.command(cls=Command)
@run_argument
@click.argument("job_path", metavar="NEW", type=click.Path(path_type=Path))
@set_of("of the new job, e.g. optim.lr=1e-4.")
@click.option("--name", metavar="NAME", help="Name of the new run; without it, that of the file NEW.")
@click.option("--force", is_flag=True, help="Replace NEW if it exists.")
def command(run: str, job_path: Path, overrides: tuple[str, ...], name: str | None, force: bool) -> None:
    """Write the job of RUN, with every --set that it had, as the job file NEW of another run.

    Keys with their default are left out, and so are values that look like secrets. RUN is a run folder, a
    job file, or the name of a run in ./runs.

    Examples:
      clipship clone first-run try-2.toml
      clipship clone runs/first-run lower.toml --set optim.lr=1e-4
    """
    from trainer.config.loader import job_from_table, load_job, own_keys
    from trainer.config.tables import toml_text
    from trainer.launch.submission import find_run
    from trainer.plan.new_length import AS_LONG_AS_THE_JOB_SAYS
    from trainer.plan.secret_values import take_secrets

    folder = find_run(run)
    if not (folder / JOB_FILE).is_file():
        raise InputError(f"{folder} has no {JOB_FILE} yet: copy the job file that it was started with")
    before = load_job(folder / JOB_FILE)
    name = name or (job_path.stem if job_path.stem != before.name else f"{before.name}-2")
    job = load_job(folder / JOB_FILE, (*AS_LONG_AS_THE_JOB_SAYS, *overrides, f"name={toml_text(name)}"))
    table = own_keys(job, but_defaults=True)
    left_out = list(dict.fromkeys(key for key, _ in take_secrets(table)))
    job_from_table(table, str(job_path))
    head = f"# The job of {one_line(str(folder.resolve()))}, without keys that have their default.\n"
    head += "".join(f"# {one_line(key)} was left out: it looks like a secret.\n" for key in left_out)
    write_job_file(job_path, schema_line() + head + tomli_w.dumps(table), force=force)
    for key in left_out:
        say(f"warning: {key} was left out: it looks like a secret")
    click.echo(f"wrote {job_path}; next: {paste('clipship', 'check', job_path)}", err=True)
