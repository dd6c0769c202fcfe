"""scripts/find_python.sh on made-up machines: folders of fake interpreters, a PATH and a home of their own.

A fake interpreter is a shell script that starts the Python of this test and changes what it says about itself, so
that the script's own probe runs for real.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "find_python.sh"


def fake_python(path: Path, version: tuple[int, int], disguise: str = "") -> Path:
    """An executable that calls itself `path`, a CPython of `version`; `disguise` is further Python to run first."""
    prelude = (
        f"import sys; sys.version_info = ({version[0]}, {version[1]}, 1, 'final', 0); "
        f"sys.executable = sys._base_executable = {str(path)!r}; {disguise}\nexec(sys.argv[-1])"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # The probe comes as `-I -c CODE`: CODE is the last argument.
    path.write_text(f"""#!/bin/sh\nexec '{sys.executable}' -I -c "{prelude}" "$@"\n""")
    path.chmod(0o755)
    return path


def broken_shim(path: Path) -> Path:
    """What a version manager leaves on PATH for a Python that it has not selected."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'pyenv: {path.name}: command not found' >&2\nexit 127\n")
    path.chmod(0o755)
    return path


class Machine:
    """A root folder, a home and a PATH, with nothing in them."""

    def __init__(self, folder: Path):
        self.root = folder / "root"
        self.home = folder / "home"
        self.path = [folder / "bin"]
        for made in (self.root, self.home, *self.path):
            made.mkdir(parents=True)

    def find(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.pathsep.join(map(str, self.path)),
            "HOME": str(self.home),
            "FIND_PYTHON_ROOT": f"{self.root}/",
        }
        return subprocess.run(
            ["/bin/sh", SCRIPT],
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
            cwd=self.home,
        )

    def found(self, **variables: str) -> Path:
        result = self.find(**variables)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        return Path(result.stdout.removesuffix("\n"))

    def refusal(self, **variables: str) -> str:
        result = self.find(**variables)
        assert result.returncode == 1
        assert result.stdout == ""
        return result.stderr


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_the_real_interpreter_of_this_test_is_accepted(machine):
    link = machine.path[0] / "python3"
    link.symlink_to(sys.executable)
    found = machine.found()
    version = subprocess.run([found, "-c", "import sys; print(sys.version)"], capture_output=True, text=True)
    assert version.stdout.strip() == sys.version


@pytest.mark.parametrize("minor", [12, 13, 14, 15])
@pytest.mark.parametrize("name", ["python3", "python", "python3.{minor}"])
def test_on_path(machine, name, minor):
    want = fake_python(machine.path[0] / name.format(minor=minor), (3, minor))
    assert machine.found() == want


@pytest.mark.parametrize(
    "folder",
    [
        ".pyenv/versions/3.13.0/bin",
        ".asdf/installs/python/3.13.0/bin",
        ".local/share/mise/installs/python/3.13.0/bin",
        ".local/share/uv/python/cpython-3.13.0-linux-x86_64-gnu/bin",
        "miniconda3/bin",
        "miniforge3/envs/jax/bin",
    ],
)
def test_only_in_a_version_managers_folder_of_the_home(machine, folder):
    fake_python(machine.path[0] / "python3", (3, 11))
    want = fake_python(machine.home / folder / "python3.13", (3, 13))
    assert machine.found() == want


@pytest.mark.parametrize("folder", ["usr/local/bin", "opt/python/3.12/bin", "opt/conda/bin"])
def test_only_in_a_system_folder_that_is_not_on_path(machine, folder):
    want = fake_python(machine.root / folder / "python3.12", (3, 12))
    assert machine.found() == want


@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("PYENV_ROOT", "versions/3.12.1/bin"),
        ("ASDF_DATA_DIR", "installs/python/3.12.1/bin"),
        ("MISE_DATA_DIR", "installs/python/3.12.1/bin"),
        ("UV_PYTHON_INSTALL_DIR", "cpython-3.12.1/bin"),
        ("CONDA_PREFIX", "bin"),
    ],
)
def test_a_version_manager_that_its_variable_puts_elsewhere(machine, tmp_path, variable, folder):
    want = fake_python(tmp_path / "else where" / folder / "python3.12", (3, 12))
    assert machine.found(**{variable: str(tmp_path / "else where")}) == want


def test_a_broken_shim_first_on_path_is_passed_over(machine, tmp_path):
    shims, good = tmp_path / "shims", tmp_path / "good"
    for name in ("python3", "python", "python3.12", "python3.13"):
        broken_shim(shims / name)
    want = fake_python(good / "python3.13", (3, 13))
    machine.path = [shims, good]
    assert machine.found() == want


def test_broken_shims_on_path_and_the_real_one_only_in_pyenv(machine):
    for name in ("python3", "python3.12"):
        broken_shim(machine.path[0] / name)
    want = fake_python(machine.home / ".pyenv/versions/3.12.1/bin/python3.12", (3, 12))
    assert machine.found() == want


def test_a_good_one_behind_an_old_one_of_the_same_name(machine, tmp_path):
    fake_python(machine.path[0] / "python3", (3, 9))
    machine.path.append(tmp_path / "later")
    want = fake_python(tmp_path / "later" / "python3", (3, 14))
    assert machine.found() == want


def test_path_comes_before_version_managers(machine):
    fake_python(machine.home / ".pyenv/versions/3.13.0/bin/python3.13", (3, 13))
    want = fake_python(machine.path[0] / "python3", (3, 12))
    assert machine.found() == want


def test_folders_with_blanks(tmp_path):
    machine = Machine(tmp_path / "a machine  with blanks")
    want = fake_python(machine.home / ".pyenv/versions/my python/bin/python3.13", (3, 13))
    assert machine.found() == want
    want = fake_python(machine.path[0] / "python3.12", (3, 12))
    assert machine.found() == want


def test_relative_folders_of_path_are_not_searched(machine):
    fake_python(machine.home / "python3", (3, 13))  # the script runs in the home
    machine.path = [Path("."), Path("")]
    machine.refusal()


def test_only_an_old_python_is_refused_naming_versions_places_and_remedy(machine):
    old = fake_python(machine.path[0] / "python3", (3, 11))
    said = machine.refusal()
    assert "no suitable Python" in said
    for version in ("3.12", "3.13", "3.14", "3.15"):
        assert version in said
    assert f"PATH: {machine.path[0]}" in said
    assert f"{machine.home}/.pyenv/versions/*/bin" in said
    assert f"{machine.root}/usr/local/bin" in said
    assert f"{old}: Python 3.11, older than 3.12" in said
    assert "Remedy" in said
    assert "PYTHON=" in said


@pytest.mark.parametrize(
    ("version", "disguise", "reason"),
    [
        ((2, 7), "", "Python 2.7, older than 3.12"),
        ((3, 16), "", "Python 3.16, newer than 3.15"),
        ((3, 12), "sys.modules['ensurepip'] = None", "apt-get install python3.12-venv"),
        ((3, 12), "sys.modules['venv'] = None", "without venv or ensurepip"),
        ((3, 12), "sys.modules['ssl'] = None", "built without a module"),
        ((3, 12), "sys.implementation.name = 'pypy'", "pypy, not CPython"),
        ((3, 12), "sys.maxsize = 2**31 - 1", "a 32-bit build"),
        (
            (3, 13),
            "import sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1",
            "a free-threaded build",
        ),
    ],
)
def test_an_unsuitable_one_is_refused_with_its_reason(machine, version, disguise, reason):
    fake = fake_python(machine.path[0] / "python3", version, disguise)
    said = machine.refusal()
    assert str(fake) in said
    assert reason in said
    assert reason in machine.refusal(PYTHON=str(fake))


def test_an_empty_machine_is_refused(machine):
    said = machine.refusal()
    assert "Looked in" in said
    assert "unsuitable:" not in said


def test_python_picks_the_one_it_names(machine, tmp_path):
    fake_python(machine.path[0] / "python3", (3, 13))
    other = fake_python(tmp_path / "my pythons" / "python", (3, 12))
    assert machine.found(PYTHON=str(other)) == other
    named = fake_python(machine.path[0] / "python3.14", (3, 14))
    assert machine.found(PYTHON="python3.14") == named


@pytest.mark.parametrize("kind", ["missing", "broken", "old"])
def test_a_bad_python_is_an_error_though_a_good_one_is_at_hand(machine, tmp_path, kind):
    fake_python(machine.path[0] / "python3", (3, 13))
    bad = tmp_path / "bad" / "python3"
    reason = "not found"
    if kind == "broken":
        broken_shim(bad)
        reason = "does not run as a Python (exit status 127)"
    elif kind == "old":
        fake_python(bad, (3, 10))
        reason = "Python 3.10, older than 3.12"
    said = machine.refusal(PYTHON=str(bad))
    assert f"PYTHON={bad}" in said
    assert reason in said
    assert "Remedy" in said


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="this test runs outside a virtual environment")
def test_in_a_virtual_environment_the_python_behind_it_is_named(machine):
    """Else `make` inside an activated .venv would rebuild that .venv with its own interpreter."""
    (machine.path[0] / "python3").symlink_to(Path(sys.prefix) / "bin" / "python")
    machine.path = [Path(sys.prefix) / "bin"]
    found = machine.found()
    assert Path(sys.prefix) not in found.parents
    assert found.resolve() == Path(sys.executable).resolve()


@pytest.mark.skipif(shutil.which("dash") is None, reason="no dash on this machine")
def test_runs_in_a_plain_posix_shell(machine):
    want = fake_python(machine.home / ".pyenv/versions/3.13.0/bin/python3.13", (3, 13))
    result = subprocess.run(
        [shutil.which("dash"), SCRIPT],
        env={"PATH": str(machine.path[0]), "HOME": str(machine.home), "FIND_PYTHON_ROOT": f"{machine.root}/"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"{want}\n"


def test_the_supported_versions_agree_with_pyproject():
    """The finder's list, the classifiers and the Python of this run tell one story."""
    classifiers = (SCRIPT.parents[1] / "pyproject.toml").read_text()
    line = next(line for line in SCRIPT.read_text().splitlines() if line.startswith("SUPPORTED="))
    supported = line.removeprefix("SUPPORTED=").strip('"').split()
    assert sysconfig.get_python_version() in supported
    for version in supported:
        assert f"Programming Language :: Python :: {version}" in classifiers
