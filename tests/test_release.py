"""The wheel and the sdist hold what an installation needs, and train when nothing else of the repository is there."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import lightning_scape

ROOT = Path(__file__).resolve().parents[1]
SMOKE = """
import sys, torch, lightning_scape
from lightning.pytorch import Trainer
assert lightning_scape.__file__.startswith(sys.argv[1]), lightning_scape.__file__
model = torch.nn.Linear(8, 8)
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = lightning_scape.ScapeOptimizer.from_optimizer(adamw, lightning_scape.ScapeConfig(sparsity=0.5))
before = None
for _ in range(20):
    loss = (model(torch.eye(8)) - torch.eye(8)).square().mean()
    before = loss if before is None else before
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert loss < before
assert lightning_scape.__file__.startswith(sys.argv[1]), lightning_scape.__file__
Trainer(strategy="scape", accelerator="cpu", devices=2, logger=False)
print(lightning_scape.__version__)
"""


def run(*command: object, cwd: Path, path: Path | None = None) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    environ["LIGHTNING_SCAPE_OPS"] = "naive"  # a fresh installation compiles its operations first, for some 15 seconds
    if path is not None:
        environ |= {"PYTHONPATH": os.pathsep.join([str(path), *environ.get("PYTHONPATH", "").split(os.pathsep)[1:]])}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environ, capture_output=True, text=True, timeout=290, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.few(0)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["whl", pytest.param("gz", marks=pytest.mark.slow)])
def test_wheel_and_sdist_build_install_and_train(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("build", reason="needs build and hatchling: pip install -e '.[test]'")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    version = lightning_scape.__version__
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert wheel.name == f"lightning_scape-{version}-py3-none-any.whl"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "mkdocs.yml", "docs/index.md", "docs/images/step.svg"} <= names
    assert {
        "configs/tiny_cpu.yaml",
        "examples/fabric_loop.py",
        "examples/python_source.py",
        "tests/conftest.py",
    } <= names

    # The repository must not be on the path: Python puts a script's own folder there.
    script = tmp_path / "smoke" / "smoke.py"
    script.parent.mkdir()
    script.write_text(SMOKE)
    install = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target")
    target = tmp_path / "installed"
    run(*install, target, {"whl": wheel, "gz": sdist}[kind], cwd=tmp_path)
    assert run(sys.executable, script, target, cwd=script.parent, path=target).strip().endswith(version)
    tool = (sys.executable, "-m", "lightning_scape", "--version")
    assert run(*tool, cwd=target.parent, path=target).strip() == version


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_extras_resolve_together() -> None:
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    constraints = ROOT / "configs" / "constraints.txt"
    resolve = (sys.executable, "-m", "pip", "install", "--dry-run", "-q", "--ignore-installed", "-c", constraints)
    run(*resolve, f"{ROOT}[{','.join(extras)}]", cwd=ROOT)


def test_the_changelog_has_this_version_and_says_how_to_upgrade() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (section,) = [part for part in text.split("\n## [")[1:] if part.startswith(f"{lightning_scape.__version__}]")]
    assert "### Upgrading" in section
