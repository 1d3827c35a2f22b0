"""What GitHub reads: workflows, issue forms, the citation, and what they refer to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(set((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) - {GITHUB / "ISSUE_TEMPLATE" / "config.yml"})
KINDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
LONGEST_JOB = 150  # minutes
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40}")
ONLY_CREDENTIALS = {"pages", "id-token"}  # what a job may write


def named(path: Path) -> str:
    return path.stem


def read(path: Path) -> dict:
    # YAML 1.1 takes the word `on` for a boolean
    return {"on" if key is True else key: value for key, value in yaml.safe_load(path.read_text()).items()}


def jobs(path: Path) -> dict[str, dict]:
    return read(path)["jobs"]


def steps(path: Path) -> list[dict]:
    return [step for job in jobs(path).values() for step in job.get("steps", [])]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def version() -> str:
    return re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


# workflows


def test_there_is_one_for_each_purpose():
    assert {path.stem for path in WORKFLOWS} == {"docs", "macos", "release", "tests", "wheels"}
    runners = {runner for path in WORKFLOWS for runner in re.findall(r"(?:ubuntu|macos)-[\w.-]+", path.read_text())}
    assert runners == {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_they_call_targets_of_make_that_exist(path):
    called = {name for step in steps(path) for name in re.findall(r"^make ([\w-]+)", step.get("run", ""), re.MULTILINE)}
    assert called - targets() == set()
    assert called or path.stem == "release"


@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_actions_are_pinned(path):
    """By a commit: a tag can be moved. A workflow of this repository is none of another's."""
    used = [step["uses"] for step in steps(path) if "uses" in step]
    used += [job["uses"] for job in jobs(path).values() if "uses" in job]
    for name in used:
        assert PINNED.fullmatch(name) or (ROOT / name).is_file(), name
    for line in path.read_text().splitlines():
        if "@" in line and "uses:" in line:
            assert re.search(r"# v\d+\.\d+\.\d+$", line), f"{line.strip()} does not say its version"


@pytest.mark.parametrize("path", WORKFLOWS, ids=named)
def test_they_may_do_little_and_end(path):
    whole = read(path)
    assert whole["permissions"] == {"contents": "read"} and whole["concurrency"]["group"]
    for name, job in whole["jobs"].items():
        writes = {what for what, how in job.get("permissions", {}).items() if how == "write"}
        assert writes <= ONLY_CREDENTIALS and (not writes or "environment" in job), name
        assert "uses" in job or 0 < job["timeout-minutes"] <= LONGEST_JOB, name
        for step in job.get("steps", []):
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name


def test_a_release_is_published_from_a_tag_alone_and_without_a_token():
    whole = read(GITHUB / "workflows" / "release.yml")
    assert whole["on"] == {"push": {"tags": ["v*"]}}
    publish = whole["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"]["name"] == "pypi"
    assert publish["needs"] == "wheels" and whole["jobs"]["wheels"]["needs"] == "version"
    assert not any("run" in step for step in publish["steps"]), "nothing else runs where the right to publish is"
    assert "secrets" not in (GITHUB / "workflows" / "release.yml").read_text()


def test_what_wheels_uploads_is_what_release_downloads():
    (upload,) = (
        step["with"] for step in steps(GITHUB / "workflows" / "wheels.yml") if "upload" in step.get("uses", "")
    )
    download = steps(GITHUB / "workflows" / "release.yml")[-2]["with"]
    assert upload["name"].startswith(download["pattern"].removesuffix("*")) and download["path"] == "dist"
    (matrix,) = (job["strategy"]["matrix"]["include"] for job in jobs(GITHUB / "workflows" / "wheels.yml").values())
    files = [file for row in matrix for file in row["files"].split()]
    assert len(set(files)) == len(files) and all(file.startswith("dist/") for file in files)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_a_tag_of_another_version_is_no_release():
    def ask(asked: str) -> int:
        command = ["make", "version-is", f"VERSION={asked}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode

    assert ask(version()) == 0 and ask("9.9.9") != 0 and ask("") != 0


# Where `make lint-workflows` puts it: make does not look there.
BESIDE = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
ACTIONLINT = shutil.which("actionlint", path=BESIDE)


@pytest.mark.skipif(ACTIONLINT is None, reason="no actionlint here; `make lint-workflows` installs it")
def test_actionlint_is_content():
    done = subprocess.run([ACTIONLINT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# issues and changes


def test_there_are_forms_for_four_kinds_of_issues():
    assert [path.stem for path in FORMS] == ["feature", "refused", "slower", "wrong_result"]
    assert set(yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "config.yml").read_text())) == {"blank_issues_enabled"}


@pytest.mark.parametrize("path", FORMS, ids=named)
def test_forms_are_as_github_wants_them(path):
    form = yaml.safe_load(path.read_text())
    assert set(form) == {"name", "description", "title", "labels", "body"}
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    labels = [field["attributes"]["label"] for field in form["body"] if field["type"] != "markdown"]
    assert len(set(ids)) == len(ids) and len(set(labels)) == len(labels)
    assert all(re.fullmatch(r"[\w-]+", name) for name in ids)
    for field in form["body"]:
        assert field["type"] in KINDS and set(field) <= {"type", "id", "attributes", "validations"}
        assert set(field.get("validations", {})) <= {"required"}
    assert "sdpa info" in path.read_text() and "sdpa explain" in path.read_text()


def test_what_changes_and_reports_are_asked_for():
    asked = (GITHUB / "PULL_REQUEST_TEMPLATE.md").read_text()
    assert re.findall(r"^## (.+)$", asked, re.MULTILINE) == ["What", "Tests", "Figures"]
    assert "../../security/advisories/new" in (ROOT / "SECURITY.md").read_text()


@pytest.mark.parametrize("page", ["SECURITY.md", ".github/PULL_REQUEST_TEMPLATE.md"])
def test_pages_name_targets_that_exist(page):
    assert set(re.findall(r"`make ([\w-]+)", (ROOT / page).read_text())) <= targets()


# the citation


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version()
    assert citation["title"] == "sdpa" and citation["authors"] == [{"name": "The sdpa-kernels authors"}]
    assert re.search(f'^license = "{citation["license"]}"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_the_citation_has_the_fields_of_its_format():
    """Those that the format 1.2.0 requires, as texts: a bare 1.10 would be a number."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation) and citation["cff-version"] == "1.2.0"
    texts = {"cff-version", "message", "type", "title", "abstract", "version", "license"}
    assert set(citation) - texts == {"authors", "keywords"}
    assert all(isinstance(citation[name], str) for name in texts)
