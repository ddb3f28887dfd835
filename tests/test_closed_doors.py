"""What SECURITY.md promises, each with its test. Listening sockets: `test_main_ppo` and `e2e/test_grpo`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl_lite import main_ppo, plan
from verl_lite.config import Config, EngineKwargs, redacted, secrets_of, unflatten, without_secrets
from verl_lite.rollout.engine import EngineSettings
from verl_lite.rollout.vllm_engine import _environment
from verl_lite.tracking import printable

PACKAGE = Path(main_ppo.__file__).parent
ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\r\u202e"
SPELLED_OUT = "\\x1b]0;title\\x07\\x1b[2J\\x9b31m\\r\\u202e"

# Bytes that this run's own processes have written, on pipes and in the object store that only they hold.
OWN_PICKLES = {
    ("data/prompts.py", "pickle.load"),
    ("data/prompts.py", "pickle.loads"),
    ("distributed/worker_group.py", "cloudpickle.loads"),
}
CODE_FROM_DATA = {
    "eval", "exec", "compile", "os.system", "os.popen", "torch.load", "yaml.load", "pickle.load", "pickle.loads",
    "cloudpickle.loads", "marshal.loads", "joblib.load", "subprocess.getoutput",
}  # fmt: skip


def calls() -> Iterator[tuple[str, ast.Call]]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield str(path.relative_to(PACKAGE)), node


def test_nothing_turns_data_into_code() -> None:
    found = {(file, ast.unparse(call.func)) for file, call in calls()}
    assert {(file, name) for file, name in found if name in CODE_FROM_DATA} == OWN_PICKLES


def test_no_process_is_started_through_a_shell() -> None:
    shells = [ast.unparse(call) for _, call in calls() for keyword in call.keywords if keyword.arg == "shell"]
    assert shells == []


def test_weights_are_never_read_from_pickles() -> None:
    loads = [call for file, call in calls() if ast.unparse(call.func) == "auto_class.from_pretrained"]
    assert loads and all("use_safetensors=True" in ast.unparse(call) for call in loads)


def test_control_characters_are_spelled_out() -> None:
    assert printable(f"a{ESCAPES}b\n\tä → 你") == f"a{SPELLED_OUT}b\n\tä → 你"


SECRETS = {
    "ray_kwargs.ray_init.runtime_env": {
        "env_vars": {"HOME": "/home/somebody"},
        "working_dir": "https://user:p4ssw0rd@host/code.zip",
    },
    "reward.custom_reward_function.reward_kwargs": {
        "openai_api_key": "sk-first", "HF_TOKEN": "hf-second", "db": {"DB_PASSWORD_FILE": "third-one"}, "max_tokens": 5,
        "token": "4th", "judge": "http://localhost:8000/v1", "password": 33344455, "n_token": 5,
        "credentials": {"user": "fifth-one", "more": ["sixth-one"]}, "proxy": "http://me:p@ssw0rd@host:80/a",
    },
}  # fmt: skip


def test_secrets_are_not_shown_and_nothing_else_is_hidden() -> None:
    tree = redacted(unflatten(SECRETS))
    runtime_env = tree["ray_kwargs"]["ray_init"]["runtime_env"]
    assert runtime_env == {"env_vars": {"HOME": "***"}, "working_dir": "https://user:***@host/code.zip"}
    assert tree["reward"]["custom_reward_function"]["reward_kwargs"] == {
        "openai_api_key": "***", "HF_TOKEN": "***", "db": {"DB_PASSWORD_FILE": "***"}, "max_tokens": 5, "token": "***",
        "judge": "http://localhost:8000/v1", "password": "***", "n_token": 5,
        "credentials": {"user": "***", "more": ["***"]}, "proxy": "http://me:***@host:80/a",
    }  # fmt: skip
    assert redacted(Config())["data"]["prompt_key"] == "prompt"


def test_texts_lose_the_secrets_of_config_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_THING", "of-the-environment")
    monkeypatch.setenv("MY_KEY", "short")  # would hide every "short" in the log
    secrets = secrets_of(unflatten(SECRETS))
    text = "sk-first, of-the-environment, 4th, short, mysql://root:pw@db/x, http://host:80/a@b"
    assert without_secrets(text, secrets) == "***, ***, 4th, short, mysql://root:***@db/x, http://host:80/a@b"


def test_console_and_log_show_neither_secrets_nor_control_characters(tmp_path: Path) -> None:
    code = f"""
import logging, sys
from verl_lite.main_ppo import _log_to
log = open(sys.argv[1], "a")
console = _log_to(log, ["hunter2-hunter2"])
logging.getLogger("verl_lite.x").warning("wrote %s for hunter2-hunter2", {ESCAPES!r})
logging.getLogger("ray").error("hunter2-hunter2")
print("failed: hunter2-hunter2", {ESCAPES!r}, file=console)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "driver.log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"warning: wrote {SPELLED_OUT} for ***\n"
    assert done.stderr == f"failed: *** {SPELLED_OUT}\n"
    log = (tmp_path / "driver.log").read_text()
    assert SPELLED_OUT in log and "\x1b" not in log and "hunter2" not in log and log.count("***") == 2


def test_vllm_takes_no_pickles_whatever_the_environment_says() -> None:
    settings = EngineSettings(
        model_path="m", device="cpu", dtype="float32", max_model_len=8, eos_token_ids=(1,), vocab_size=8,
        start_timeout_s=1, engine_kwargs=EngineKwargs().vllm,
    )  # fmt: skip
    assert _environment(settings)["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"


@pytest.mark.parametrize("main", [main_ppo.main, plan.main])
@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.total_epochs=${oc.env:MY_TOKEN}"],
        ["trainer.default_local_dir=s3://me:sk-sesame@host/\x1b[2J", "trainer.logger=[nonsuch]"],
        ["ray_kwargs.ray_init.address=http://me:sk-sesame@host:1", "trainer.total_epochs=0"],
        ["reward.custom_reward_function.reward_kwargs.api_key=sk-sesame", "reward.on_error=sk-sesame"],
        ["reward.custom_reward_function.reward_kwargs.api_key=sk-sesame==", "trainer.project_name='\x1b[2J'"],
        ["trainer.resume_from_path='\x1b[2J'", "data.seed=x\x1b[2J"],
    ],
)
def test_a_refusal_shows_neither_secrets_nor_control_characters(
    main: Callable[[list[str]], int],
    overrides: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MY_TOKEN", "sk-sesame")
    assert main(overrides) == main_ppo.REFUSED
    text = capsys.readouterr().err
    assert text.startswith("refused: ") and "sk-sesame" not in text and "\x1b" not in text
