"""The scripts around the package, as far as they run without a GPU and without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

README = """
<!-- run -->
```bash
echo one > {folder}/one
test -f README.md
```

```bash
exit 1  # not marked
```

<!-- run -->

```bash
cat {folder}/one
{last}
```
"""


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    full = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "VIRTUAL_ENV": sys.prefix} | env
    return subprocess.run(command, cwd=ROOT, env=full, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("last, status", [("true", 0), ("false | true", 1)])
def test_readme_commands_are_run(tmp_path, last, status):
    readme = tmp_path / "README.md"
    readme.write_text(README.format(folder=tmp_path, last=last))
    done = run([sys.executable, "scripts/check_readme.py", str(readme)])
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout.count("README.md:") == 2 and done.stdout.startswith("one\n") is False
    assert (tmp_path / "one").is_file()


def test_readme_marker_without_block(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("<!-- run -->\nno block\n")
    assert "1 markers" in run([sys.executable, "scripts/check_readme.py", str(readme)]).stderr


def test_readme_of_the_repository_is_well_formed():
    assert run([sys.executable, "scripts/check_readme.py", "--list"]).returncode == 0


def test_sections_of_the_model_that_are_cited_exist():
    headings = set(re.findall(r"^#{2,3} (\d(?:\.\d)?)\.? ", (ROOT / "docs/model.md").read_text(), re.M))
    cited: dict[str, str] = {}
    for folder in ("mini_deepinfer", "csrc", "bench", "tests", "scripts"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp"):
                for text in re.findall(r"spec (\d(?:\.\d)?(?:(?:, | and )\d(?:\.\d)?)*)", path.read_text()):
                    cited |= dict.fromkeys(re.split(", | and ", text), path.name)
    assert len(cited) > 30
    assert {section: name for section, name in cited.items() if section not in headings} == {}


def test_guards_of_the_known_faults_exist():
    named = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", (ROOT / "docs/cases.md").read_text())
    assert len(named) > 50
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert not missing


@pytest.mark.parametrize("document", ["README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))])
def test_links_and_paths_of_the_documents_exist(document):
    text, folder = (ROOT / document).read_text(), (ROOT / document).parent
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (folder / target).exists(), target
    for path in re.findall(r"`((?:bench|csrc|docs|scripts|tests)/[\w./*-]+)`", text):
        assert list(ROOT.glob(path)), path


def test_gpu_check_summarises(tmp_path):
    done = run(["bash", "scripts/gpu_check.sh", "--tests", "tests/cpu/test_report.py", "tests/cpu/no_such_test.py"], OUT=str(tmp_path))
    assert done.returncode == 1
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert lines[1].startswith("PASS  tests/cpu/test_report.py") and "passed" in lines[1]
    assert lines[2].startswith("FAIL  tests/cpu/no_such_test.py: exit status 4")
    assert lines[3] == "gpu_check: FAILED"
    assert run(["bash", "scripts/gpu_check.sh", "--nope"], OUT=str(tmp_path)).returncode == 2


@pytest.mark.parametrize("script", [*sorted(p.name for p in (ROOT / "scripts").glob("*.sh")), "../.ci/run"])
def test_shell_scripts_parse(script):
    assert run(["bash", "-n", f"scripts/{script}"]).returncode == 0
