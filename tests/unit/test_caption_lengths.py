"""Captions that are longer than the text tower takes: counted before a run, in it, and by `data stats`."""

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from PIL import Image

from tests.support.jobs import VIT, tiny_job
from trainer.cli.main import main
from trainer.config import Data, Model
from trainer.data.caption_lengths import CaptionLengths, CaptionMonitor, counter_of
from trainer.data.mojibake import as_gbk, gbk_warning
from trainer.data.shard_files import write_shards
from trainer.data.tokens import quick
from trainer.model.light_tokenizer import lengths_for
from trainer.plan.describe import describe
from trainer.plan.first_samples import FirstSamples

SHORT, LONG = "a dog", "一只棕色的狗在绿色的草地上追着一个红色的球"
CAPTIONS = [SHORT, LONG, "Curly “quotes” &amp; naïve words, l'eau", ""]
CAPTIONS_ARE_POSITIVES = {"positives": "captions"}
"""Equal captions, which these tests have, are then no reason for a warning."""


def shards(folder: Path, long: int, short: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "jpeg")
    texts = [LONG] * long + [SHORT] * short
    write_shards(
        (
            (f"{number:03d}", {"jpg": file.getvalue(), "txt": text.encode()})
            for number, text in enumerate(texts)
        ),
        folder,
        100,
    )
    return str(folder / "shard-000000.tar")


def test_tokens_are_counted_alike_with_and_without_torch() -> None:
    simple = SimpleTokenizer()
    exact = [len(simple.encode(text)) + 2 for text in CAPTIONS]
    of_the_run = counter_of(quick(simple))
    assert of_the_run is not None
    assert list(map(of_the_run, CAPTIONS)) == exact
    found = lengths_for(Model(name=VIT), CAPTIONS)
    assert found is not None
    assert (found.most, found.tokens) == (16, exact)
    assert exact[1] > 16, "so that the test cuts something"
    longer = lengths_for(Model(name=VIT, context_length=64), CAPTIONS)
    assert longer is not None
    assert (longer.most, longer.cut_share) == (64, 0)


def test_the_count_imports_no_torch() -> None:
    code = (
        "import sys; from trainer.config import Model; from trainer.model.light_tokenizer import lengths_for;"
        f"print(lengths_for(Model(name={VIT!r}), ['a dog']).tokens, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[4] False\n"


def test_a_tokenizer_of_transformers_counts_with_the_ends_that_it_adds() -> None:
    class Words:
        def __call__(self, text: str, *, verbose: bool) -> dict[str, list[str]]:
            return {"input_ids": ["[CLS]", *text.split(), "[SEP]"]}

    tokenizer = HFTokenizer.__new__(HFTokenizer)
    tokenizer.tokenizer, tokenizer.clean_fn = Words(), str.strip
    counter = counter_of(tokenizer)
    assert counter is not None
    assert counter(" two words ") == 4
    assert counter_of(object()) is None
    assert lengths_for(Model(name="roberta-ViT-B-32"), CAPTIONS) is None, "which only the ranks can count"


def test_check_says_how_many_captions_lose_their_end_and_what_to_do(tmp_path: Path) -> None:
    job = tiny_job(
        data={"format": "auto", "train": (shards(tmp_path, long=2, short=18),)}, optim=CAPTIONS_ARE_POSITIVES
    )
    text = describe(job, 1, 20, local=True)
    assert "in 20 captions; the model takes 16: 10.0% lose their end" in text
    (warning,) = FirstSamples(job).warnings()
    assert "10% of the captions have more than the 16 tokens that the model takes" in warning
    assert "set model.context_length = " in warning
    data = {"format": "auto", "train": job.data.train, "text_mask": "random"}
    masked = tiny_job(data=data, optim=CAPTIONS_ARE_POSITIVES)
    assert not list(FirstSamples(masked).warnings()), "that key says which tokens stay"


def test_one_caption_in_a_hundred_is_no_reason_for_a_warning(tmp_path: Path) -> None:
    job = tiny_job(
        data={"format": "auto", "train": (shards(tmp_path, long=1, short=99),)}, optim=CAPTIONS_ARE_POSITIVES
    )
    assert "1.0% lose their end" in dict(FirstSamples(job).rows())["captions"]
    assert not list(FirstSamples(job).warnings())


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_captions_of_tables_are_read_without_their_images(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".csv":
        path.write_text(f"image,caption\ngone.jpg,{LONG}\ngone.jpg,{SHORT}\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.table({"image": ["gone.jpg", "gone.jpg"], "caption": [LONG, SHORT]})
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    first = FirstSamples(tiny_job(data={"format": "auto", "train": (str(path),)}))
    assert first.captions == [LONG, SHORT]
    assert first.lengths is not None
    assert first.lengths.cut_share == 0.5


@pytest.mark.parametrize(
    ("short", "long", "advised"),
    [(49, 1, 32), (1, 1, 32), (0, 1, 32), (98, 2, 32), (97, 3, 32), (980, 20, 32)],
)
def test_the_length_that_is_advised_takes_the_captions(short: int, long: int, advised: int) -> None:
    lengths = CaptionLengths(16, len, [SHORT] * short + ["x" * 30] * long)
    assert f"set model.context_length = {advised} for 99 % of them" in lengths.warning()
    assert CaptionLengths(advised, len, ["x" * 30]).warning() == ""


def test_a_hundredth_of_captions_may_be_longer_than_the_length_that_is_advised() -> None:
    lengths = CaptionLengths(16, len, [SHORT] * 900 + ["x" * 20] * 90 + ["x" * 70] * 10)
    assert "set model.context_length = 24 for" in lengths.warning()


def test_a_run_says_it_once_when_it_has_seen_enough(caplog: pytest.LogCaptureFixture) -> None:
    def said() -> list[str]:
        return [record.levelname for record in caplog.records]

    with caplog.at_level(logging.INFO, "clipship"):
        monitor = CaptionMonitor(CaptionLengths(4, len), 5000, Data(train=("a.tar",)))
        monitor.record(["abc"] * 600)
        assert said() == []
        monitor.record(["abcdef"] * 600)
        monitor.record(["abcdef"] * 600)
        assert said() == ["INFO", "WARNING"]
        assert "in 1,000 captions; the model takes 4: 40.0% lose their end" in caplog.text
        caplog.clear()
        short = CaptionMonitor(CaptionLengths(4, len), 6, Data(train=("a.tar",), text_mask="random"))
        short.record(["abcdef"] * 4)
        assert said() == []
        short.record(["abcdef"] * 2)
        assert said() == ["INFO"], "the run has no more, and its text_mask says which tokens stay"


def test_statistics_count_tokens_for_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shards(tmp_path, long=1, short=3)
    found = []
    for options in ([], ["--model", VIT], ["--model", VIT, "--context-length", "77"]):
        assert main(["data", "stats", path, *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [numbers["context_length"] for numbers in found] == [77, 16, 77]
    assert [numbers["cut_captions"] for numbers in found] == [0.0, 0.25, 0.0]


@pytest.mark.parametrize("text", ["学习", "a 学习 b", "校园"])
def test_gbk_that_is_valid_utf_8_is_found(text: str, tmp_path: Path) -> None:
    read = text.encode("gbk").decode()
    assert as_gbk(read) == text
    path = tmp_path / "t.csv"
    rows = ["image,caption", "gone.jpg,a dog", *[f"gone.jpg,{text}"] * 3]
    path.write_bytes("\n".join(rows).encode("gbk"))
    data = {"format": "auto", "train": (str(path),)}
    (warning,) = FirstSamples(tiny_job(data=data, optim=CAPTIONS_ARE_POSITIVES)).warnings()
    assert warning == (
        f'3 of 3 captions that are not ASCII, such as "{read}", seem to be GBK, which is also valid UTF-8 '
        f'("{text}"): set data.encoding = "gb18030"'
    )
    named = tiny_job(data={**data, "encoding": "gb18030"}, optim=CAPTIONS_ARE_POSITIVES)
    assert not list(FirstSamples(named).warnings())


@pytest.mark.parametrize(
    "text",
    ["naïve café, Ångström", "собака бежит", "σκύλος", "כלב רץ", "كلب", "một con chó đang chạy", "50 µm, 3 Ω",
     "一只狗", "“quotes”", "Ελλάδα и Россия", "e\u0301te\u0301",
     "I don\u00e2\u0080\u0099t know", "caf\u00c3\u00a9 \u00e2\u0080\u0094 \u00ce\u00b1"],
)  # fmt: skip
def test_other_writing_is_not_taken_for_it(text: str) -> None:
    assert as_gbk(text) is None


def test_few_odd_captions_do_not_change_how_all_are_read() -> None:
    odd = "学习".encode("gbk").decode()
    assert not gbk_warning([odd] * 2, "utf-8")
    assert gbk_warning([odd] * 3 + ["a dog"] * 1000, "utf-8").startswith("3 of 3 captions")
    assert not gbk_warning([odd] * 3 + ["café"] * 300, "utf-8")
    assert not gbk_warning(["I don\u00e2\u0080\u0099t know"] * 9 + ["café"] * 9, "utf-8")
