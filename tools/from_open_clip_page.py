"""The page docs/from-open-clip.md, from the table: each flag of open_clip_train beside our keys."""

from collections.abc import Iterator

from trainer.from_open_clip.table import GROUPS
from trainer.from_open_clip.table_4 import NOT_SUPPORTED
from trainer.from_open_clip.translation import Flag

_BEGIN = """
`clipship from-open-clip` prints the job file of a command line of open_clip_train. The tables below have
a row for each flag of open_clip_torch 3.3, and for each that release 4 adds and a job can express: the
command works by the same rows. Release 4 is open_clip's main branch, which is not published yet. Behind a
flag that only one of the two has stands which one. `--release 4` says that a command line is for 4, where
some defaults are others; without it, a line is taken for 3.3 unless only 4 has its flags.

```text
clipship from-open-clip --gpus 8 -- --train-data 'cc3m/{0000..0331}.tar' --model ViT-B-32 \\
    --batch-size 256 --precision amp_bf16 --train-num-samples 2905954 > job.toml
clipship check job.toml
clipship run job.toml --nproc 8
```

Where the two defaults differ, the job file states open_clip_train's. Flags without a matching key are listed
on stderr and at the end of the job file, with the reason. Unknown flags are refused, and so are those that
change what is trained and that a job cannot express ("refused" below); `--partial` prints the job without
these. The keys are described in [the job file's reference](job-file.md), the command in
[the command line's](cli.md).
"""

_NOT_SUPPORTED = f"""
## Not supported

These flags of release 4 are refused:
{", ".join(f"`{flag.name}`" for flag in NOT_SUPPORTED)}.
"""

_WITHOUT_FLAGS = """
## What has no flag

Some things differ without any flag:

- An epoch has each sample once, in an order that follows from the seed, but for the last ones that fill no
  batch. In open_clip_train, loader processes repeat or leave out samples, so that each makes equally many
  batches.
- The whole text of a .txt member is one caption, as in open_clip_train, by `data.caption_lines = "one"`.
  Without that key each line is a caption, and one of them is drawn in each epoch (`data.caption_choice`).
  open_clip_train reads none from JSON (`data.caption_key = "json:caption"`).
- Pictures are decoded as a viewer shows them: turned as their metadata say, white behind transparent
  parts, and 16 bits of grey scaled to 8. open_clip_train takes Pillow's `convert("RGB")`: pictures are not
  turned, transparent parts have the colour that lies in the file, often black, and grey above 255 is white.
- Damaged samples are counted, and more than 1 % of them end the run (`data.max_bad_share`). open_clip_train
  goes on with any number.
- The gradient is that of the whole global batch on any number of GPUs, as open_clip_train has it with
  `--local-loss --gather-with-grad` in torch.
- A second start of the same command resumes at the next step, not at the next epoch, and does not refuse the
  name.
- Logged losses are means over all ranks, and all ranks share an evaluation. In open_clip_train,
  rank 0 logs its own loss and evaluates alone, and the others give up after 600 s (`NCCL_TIMEOUT`
  changes nothing: no library reads it); the limit here is `timeouts.eval_s`.
- Matrices in float32 are multiplied in float32; open_clip_train always allows TF32 on GPUs, which is
  a precision of its own here.
"""


def from_open_clip_blocks() -> Iterator[str]:
    """Yields the page's title, paragraphs and tables as Markdown, not wrapped."""
    yield "# From open_clip_train"
    yield from _blocks(_BEGIN)
    for topic, flags in GROUPS.items():
        yield f"## {topic}"
        rows = [_row(flag) for flag in flags]
        yield "\n".join(["| open_clip_train | here | |", "|---|---|---|", *rows])
    yield from _blocks(_NOT_SUPPORTED)
    yield from _blocks(_WITHOUT_FLAGS)


def _row(flag: Flag) -> str:
    keys = ", ".join(f"`{key}`" for key in flag.keys)
    refused = flag.fate in ("not wanted", "not supported yet") and not flag.harmless
    here = keys or f"{flag.fate}, refused" if refused else keys or flag.fate
    text = flag.text[0].upper() + flag.text[1:]
    name = f"`{flag.name}`" + (f", `{flag.also}`" if flag.also else "")
    name += f" ({flag.release})" if flag.release else ""
    return f"| {name} | {here} | {text}{'' if text.endswith('.') else '.'} |"


def _blocks(text: str) -> Iterator[str]:
    """Yields the paragraphs; the entries of a list become one line each."""
    for block in text.strip().split("\n\n"):
        yield block.replace("\n  ", " ") if block.startswith("- ") else block
