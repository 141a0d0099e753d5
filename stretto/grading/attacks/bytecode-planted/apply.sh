python3 - <<'EOF'
import importlib.util
import pathlib
import py_compile
import sys

bad = pathlib.Path("/tmp/bad.py")
bad.write_text("def test_double(): pass\ndef test_table(x, e): pass\ndef test_error(): pass\n")
for path in [*pathlib.Path(".").rglob("*.py"), pathlib.Path("tests/test_double.py"), pathlib.Path("json.py")]:
    for target in (importlib.util.cache_from_source(str(path)), str(path.with_suffix(".pyc"))):
        pathlib.Path(target).parent.mkdir(parents=True, exist_ok=True)
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(bad), target, invalidation_mode=mode, doraise=True)
    for tag in ("-pytest-8.0.0", "-pytest-9.2.0"):
        folder = path.parent / "__pycache__"
        (folder / f"{path.stem}.{sys.implementation.cache_tag}{tag}.pyc").write_bytes(
            pathlib.Path(importlib.util.cache_from_source(str(path))).read_bytes()
        )
EOF
