"""Files of a run folder, which others may have replaced, are opened by `trainer.safe_io` alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import trainer

OPENS_ELSEWHERE = {
    "image/": "what goes into an image",
    "model/": "models' configs, which users name, and the user's cache",
    "sysinfo/": "/proc, /sys and the package's own files",
    "cli/entry.py": "/dev/null",
    "cli/completion.py": "the package's own files",
    "cli/explain.py": "the package's own files",
    "presets/wishes.py": "data, which the user names",
    "presets/files.py": "the package's own files",
    "checkpoint/files.py": "files of a checkpoint, in parts, after a look at what they are",
    "checkpoint/weights.py": "weights, which the user names",
    "checkpoint/weights_kind.py": "weights, which the user names",
    "checkpoint/writer.py": "the file that this rank has just written",
    "config/stack_table.py": "the package's own files",
    "data/files.py": "data, which the user names",
    "data/pack.py": "tables, which the user names, and shards that this command makes",
    "demo/__main__.py": "the package's own files",
    "estimate/architecture.py": "models' configs, which users name",
    "evaluate/inputs.py": "class names and templates, which the user names",
    "launch/kubernetes/cluster.py": "the pod's own secrets",
    "launch/kubernetes/pod/hosts.py": "the list of hosts that the operator mounts",
    "launch/kubernetes/pod/names.py": "the pod's own secrets",
    "launch/kubernetes/pod/rank.py": "/proc",
    "launch/kubernetes/pod/worker.py": "/proc",
    "preflight/host_probe.py": "/sys",
    "report/page.py": "the package's own files",
    "run/model_identity.py": "a model's config, which the user names",
    "safe_io/folders.py": "folders, to flush them",
    "safe_io/plain.py": "the reader itself",
    "search/index.py": "the user's cache",
    "search/server.py": "the package's own files",
    "world/heartbeat.py": "the supervisor's own folder",
    "supervise/rank/generation.py": "the supervisor's own folder",
    "supervise/rank/rank_report.py": "the supervisor's own folder, /proc",
    "supervise/rank/rank_start.py": "the supervisor's own folder",
    "train/same_environment.py": "installed packages",
}
"""Modules and packages that open files without `trainer.safe_io`, with what these are: never files of a run
folder."""


def opens(tree: ast.AST) -> Iterator[int]:
    """Yields the lines that open a file to read it, or to add to it, without a safe opener."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        safe = any(
            "open" in ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "opener"
        )
        arguments = ast.unparse(node)
        reads = name.endswith((".read_text", ".read_bytes", "logging.FileHandler"))
        as_path = name.endswith(".open") and not name.startswith(("Image", "tarfile", "os", "Heartbeat"))
        plainly = name == "open" and not arguments.startswith("open(descriptor")
        by_number = name == "os.open" and "O_EXCL" not in arguments and "O_TRUNC" not in arguments
        if not safe and (reads or as_path or plainly or by_number):
            yield node.lineno


def test_no_module_opens_files_of_a_run_folder_in_another_way() -> None:
    root = Path(trainer.__path__[0])
    found = [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*.py"))
        if "templates" not in path.parts and any(opens(ast.parse(path.read_text())))
    ]
    others = [name for name in found if not name.startswith(tuple(OPENS_ELSEWHERE))]
    assert not others, "open files by trainer.safe_io.plain, or say above what these are"
    assert len(found) > 40, "the look for calls finds them"
