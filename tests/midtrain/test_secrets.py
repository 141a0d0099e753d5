"""No credential survives `stretto corpus build`: of many kinds, written in many ways, in every sort of source."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest
from corpora import MIT, made, source

from stretto.midtrain.corpus import assigned
from stretto.midtrain.corpus.hidden import spelled

pytest.importorskip("rensa", reason="the [corpus] extra is not installed")

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
HEX, DIGITS = "0123456789abcdef", "123456789"
RNG = random.Random(4)


def draw(count: int, alphabet: str = LETTERS) -> str:
    return "".join(RNG.choice(alphabet) for _ in range(count))


def key(kind: str) -> str:
    return "\n".join([f"-----BEGIN {kind}-----", *(draw(64) for _ in range(5)), f"-----END {kind}-----"])


def kinds() -> dict[str, str]:
    return {
        "github": f'T = "ghp_{draw(36)}"',
        "github_fine": f'T = "github_pat_{draw(22)}_{draw(59)}"',
        "aws": f'K = "AKIA{draw(16, CAPITALS)}"',
        "aws_secret": f'aws_secret_access_key = "{draw(40)}"',
        "google": f'K = "AIza{draw(35)}"',
        "google_oauth": f'S = "GOCSPX-{draw(28)}"',
        "azure_storage": f'C = "AccountName=a9;AccountKey={draw(86)}==;EndpointSuffix=core.windows.net"',
        "azure_client": f'S = "{draw(3)}8Q~{draw(34)}"',
        "digitalocean": f'T = "dop_v1_{draw(64, HEX)}"',
        "slack": f'T = "xoxb-{draw(12, DIGITS)}-{draw(12, DIGITS)}-{draw(24)}"',
        "stripe": f'K = "sk_live_{draw(24)}"',
        "twilio": f'account_sid = "AC{draw(32, HEX)}"\nauth_token = "{draw(32, HEX)}"',
        "mailgun": f'K = "key-{draw(32, HEX)}"',
        "openai": f'K = "sk-proj-{draw(48)}"',
        "gitlab": f'T = "glpat-{draw(20)}"',
        "npm": f'T = "npm_{draw(36)}"',
        "sendgrid": f'K = "SG.{draw(22)}.{draw(43)}"',
        "hugging_face": f'T = "hf_{draw(34)}"',
        "telegram": f'B = "{draw(10, DIGITS)}:AA{draw(33)}"',
        "discord": f'T = "MT{draw(24)}.G{draw(5)}.{draw(38)}"',
        "tailscale": f'T = "tskey-auth-{draw(12)}-{draw(32)}"',
        "database": f'U = "postgres://admin:{draw(14)}@db.example.org/app"',
        "cache": f'U = "redis://:{draw(18)}@cache.internal:6379/0"',
        "rsa": f"K = '''{key('RSA PRIVATE KEY')}'''",
        "openssh": f"K = '''{key('OPENSSH PRIVATE KEY')}'''",
        "pgp": f"K = '''{key('PGP PRIVATE KEY BLOCK')}'''",
        "cut": f"K = '''{key('RSA PRIVATE KEY')[:300]}'''",
        "one_line": f"K = {json.dumps(key('RSA PRIVATE KEY'))}",
        "lines": "K = [\n" + "".join(f'    "{line}",\n' for line in key("EC PRIVATE KEY").split("\n")) + "]",
        "comment": "".join(f"# {line}\n" for line in key("RSA PRIVATE KEY").split("\n")),
        "key_base64": f'K = """{base64.encodebytes(key("RSA PRIVATE KEY").encode()).decode()}"""',
        "assigned": f'PASSWORD = "{draw(18)}"',
        "marks": 'PASSWORD = "kT9!vQ#2x$Lz"',
        "typed": f'API_KEY: str = "{draw(32)}"',
        "quoted": f'C = {{"api_key": "{draw(32, HEX)}"}}',
        "environment": f'os.environ["DB_PASSWORD"] = "{draw(18)}"',
        "default": f'KEY = os.getenv("API_KEY", "{draw(32)}")',
        "yaml": f'C = """\ndatabase:\n  password: {draw(18)}\n"""',
        "export": f'C = """\nexport API_SECRET={draw(32)}\n"""',
        "connection": f'C = "Server=db1;User Id=sa;Password={draw(18)};"',
        "bearer": f'H = {{"Authorization": "Bearer {draw(40)}"}}',
        "basic": f'H = {{"Authorization": "Basic {base64.b64encode(f"admin:{draw(14)}".encode()).decode()}"}}',
        "netrc": f'N = "machine api.example.com login bob password {draw(14)}"',
        "shadow": f'S = "root:$6${draw(8)}${draw(86)}:18000:0:99999:7:::"',
        "seed": f'SEED = "{"legal winner thank year wave sausage worth useful legal winner thank yellow"}"',
    }


def ways() -> dict[str, str]:
    """One token, not written in one piece."""
    token = f"ghp_{draw(36)}"
    first, second = token[:18], token[18:]
    return {
        "side_by_side": f'T = "{first}" "{second}"',
        "plus": f"T = '{token[:4]}' + '{token[4:20]}' + '{token[20:]}'",
        "two_lines": f'T = (\n    "{first}"\n    "{second}"\n)',
        "plus_below": f'T = (\n    "{first}"\n    + "{second}"\n)',
        "backslash": f'T = "{first}" \\\n    "{second}"',
        "broken": f'T = "{first}\\\n{second}"',
        "joined": f'T = "".join(["{first}", "{second}"])',
        "formatted": f'T = f"{first}" f"{second}"',
        "base64": f'T = b64decode("{base64.b64encode(token.encode()).decode()}")',
        "hexadecimal": f'T = bytes.fromhex("{token.encode().hex()}")',
        "escapes": 'T = "' + "".join(f"\\x{ord(letter):02x}" for letter in token) + '"',
        "percent": f'T = "{token[:4]}%s" % "{token[4:]}"',
        "format": f'T = "{token[:4]}{{}}".format("{token[4:]}")',
        "turned": f'T = "{token[::-1]}"[::-1]',
        "assigned": f'API_SECRET = "{draw(20)}" + "{draw(20)}"',
    }


HARMLESS = (
    'password = "correct-horse-battery"',
    'TOKEN_URL = "https://example.org/oauth2/token"',
    'secret = get("name")',
    f'SHA = "sha256:{draw(64, HEX)}"',
    'token = "your-api-token-goes-here-1234"',
    'KEY = re.compile(r"-----BEGIN (?:RSA )?PRIVATE KEY-----")',
    'SECRET_FILE = "/etc/app/secrets/database-password.txt"',
    'T = "hello " + "world" "again"',
    "authors = models.ManyToManyField(Author, through=AuthorsBooks, is_staff=True)",
    f"K = '''{key('CERTIFICATE')}'''",
    'U = "http://localhost:8080/@user"',
)


def test_no_planted_secret_survives_and_harmless_strings_do(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "LICENSE").write_text(MIT)
    planted = kinds() | {f"way_{name}": line for name, line in ways().items()}
    for number, (name, line) in enumerate(planted.items()):
        (folder / f"bad_{name}.py").write_text(f"{source(number)}\n{line}\n")
    for number, line in enumerate(HARMLESS):
        (folder / f"good_{number}.py").write_text(f"{source(100 + number)}\n{line}\n")
    call = {"function": {"name": "bash", "arguments": json.dumps({"cmd": f"export T=ghp_{draw(36)}"})}}
    talks = [
        [{"role": "assistant", "content": f"{source(200)} ghp_{draw(36)}"}],
        [{"role": "user", "content": source(201)}, {"role": "assistant", "content": None, "tool_calls": [call]}],
        [{"role": "user", "content": source(202)}, {"role": "assistant", "reasoning": f"it is ghp_{draw(36)}"}],
        [{"role": "user", "content": source(203)}, {"role": "assistant", "content": "fine"}],
    ]
    rows = [{"messages": talk, "license": "MIT"} for talk in talks]
    rows += [{"text": f"{source(204)}\nT = 'ghp_{draw(36)}'\n", "lang": "python", "license": "MIT"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kept, left, _ = made(tmp_path, ["repo", "rows.jsonl"])
    assert set(kept) == {*(f"repo/good_{number}.py" for number in range(len(HARMLESS))), "rows.jsonl/rows.jsonl:4"}
    assert len(left["secret"]) == len(planted) + 4 >= 60


def test_words_placeholders_and_digests_under_other_names_are_no_secrets() -> None:
    for line in (
        'password = "changeme12345678"',
        f'sha = "{HEX * 4}"',
        "token = next(it)",
        "key = SomeClassName2Here",
        'U = "postgresql://scott:tiger@localhost/test"',
        "auth = Div3Transform",
    ):
        assert not assigned.kind(line), line


def test_pieces_are_put_together_and_prose_is_not() -> None:
    assert 'NAME = "abcdef"' in spelled('NAME = "abc" + "def"\n')
    assert spelled('x = "one " "two"\ny = ["a", "b"]\nz = "".upper()\n"""Doc."""\n') == ""
