"""What the pages claim about the source: messages, environment variables, code, commands, figures."""

import ast
import importlib
import re
import shlex
import textwrap

import pytest
import typer
from typer.main import get_command


def _fences(text, language):
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def pages(root):
    """The text of README and of every page, by file name."""
    paths = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def _template(node):
    """Return the text an expression makes, with `…` for what is put in; None if it makes none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def test_quoted_errors_are_in_the_source(root, pages):
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (root / "src").rglob("*.py")]
    templates = [text for tree in trees for node in ast.walk(tree) if (text := _template(node))]
    quoted = [match[2] for match in re.finditer(r"^\| (`+) ?(.*?) ?\1 \|", pages["errors.md"], re.MULTILINE)]
    assert len(quoted) > 35
    missing = [message for message in quoted if not any(message in template for template in templates)]
    assert not missing


def test_environment_variables_are_those_of_the_source(root, pages):
    pattern = r"\bDIFFUSERS_H3_[A-Z0-9_]+"
    source = "\n".join(path.read_text(encoding="utf-8") for path in (root / "src").rglob("*.py"))
    table = re.findall(rf"^\| `({pattern})` \|", pages["environment.md"], re.MULTILINE)
    assert sorted(table) == sorted(set(re.findall(pattern, source)))
    assert len(table) == 2


def test_named_variables_of_others_are_read(root, pages):
    """Of the second table, those that this package itself reads."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (root / "src").rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\[)\"([A-Z_]+)\"", source)) | {"HF_HUB_CACHE", "HF_HUB_OFFLINE"}
    read -= {name for name in read if name.startswith("DIFFUSERS_H3_")}
    named = set(re.findall(r"`([A-Z][A-Z_]+)`", pages["environment.md"]))
    assert read <= named


def test_python_in_pages_compiles_and_imports_what_exists(pages):
    imported = set()
    for name, text in pages.items():
        for code in _fences(text, "python"):
            for node in ast.walk(ast.parse(textwrap.dedent(code))):
                if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "diffusers_h3":
                    module = importlib.import_module(node.module)
                    for alias in node.names:
                        assert hasattr(module, alias.name), f"{name}: {node.module}.{alias.name}"
                        imported.add(alias.name)
    assert {"VDNH3Pipeline", "FlashInferProcessor", "load_overlay"} <= imported


def _commands(text):
    """Return the command lines of this program in shell examples, and in docstrings of commands, as words."""
    lines = [line for code in _fences(text, "bash") for line in code.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"^ {4}(diffusers-h3 .*)$", text, re.MULTILINE)
    words = [shlex.split(re.sub(r"\[dim\].*", "", line), comments=True) for line in lines]
    # Launchers run the package as a module.
    return [
        line[line.index(name) + 1 :] for line in words for name in ("diffusers-h3", "diffusers_h3") if name in line
    ]


def test_commands_in_pages_and_docstrings_have_these_options(root, pages):
    from diffusers_h3.cli.application import app

    sources = [path.read_text(encoding="utf-8") for path in (root / "src/diffusers_h3/cli").glob("*.py")]
    lines = [line for text in [*pages.values(), *sources] for line in _commands(text)]
    assert {line[0] for line in lines} == {"demo", "doctor", "generate", "materialize", "overlays", "plan"}
    for line in lines:
        command = get_command(app)
        context = command.make_context("diffusers-h3", [], resilient_parsing=True)
        words = [word for word in line if word not in (">", "|")]
        while hasattr(command, "commands"):
            assert words[0] in command.commands, line
            command, words = command.commands[words[0]], words[1:]
        try:
            command.make_parser(context).parse_args(words)
        except typer.BadParameter as error:
            pytest.fail(f"{line}: {error.format_message()}")


def test_figures_of_the_pages_are_there_and_used(root, pages):
    used = {name for text in pages.values() for name in re.findall(r"\(figures/([^)]+)\)", text)}
    assert used == {path.name for path in (root / "docs" / "figures").iterdir()}


def test_every_page_is_in_the_navigation(root, pages):
    navigation = (root / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r": ([a-z]+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(set(pages) - {"README.md"})


@pytest.mark.parametrize(
    ("title", "names"), [("diffusers-h3 --help", []), ("diffusers-h3 generate --help", ["generate"])]
)
def test_help_in_pages_lists_every_option_and_command(title, names, pages):
    from diffusers_h3.cli.application import app

    command = get_command(app)
    for name in names:
        command = command.commands[name]
    shown = next(code for code in _fences(pages["cli.md"], "console") if code.startswith(f"$ {title}\n"))
    wanted = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    wanted |= set(getattr(command, "commands", {}))
    assert len(wanted) > 5
    missing = [name for name in wanted if not re.search(rf"(?<![\w-]){name}(?![\w-])", shown)]
    assert not missing, "run `python scripts/docs/generate.py`"


def test_files_named_in_pages_exist(root, pages):
    pattern = r"\b(?:benchmarks|docs|notebooks|scripts|src|tests|training)/[\w./-]*\.(?:ipynb|json|md|py)\b"
    named = {(page, path) for page, text in pages.items() for path in re.findall(pattern, text)}
    assert len(named) > 10
    assert not [(page, path) for page, path in sorted(named) if not (root / path).is_file()]
