#!/usr/bin/env python3
"""Prints, as a table, the lines of a module's files that the library's tests of this module run.

    scripts/coverage.py operator

Code that is compiled for tests alone does not count. Builds only this crate again, in the same target directory.
Needs the component `llvm-tools` of the toolchain (`rustup component add llvm-tools`).
"""

import collections
import os
import pathlib
import re
import subprocess
import sys
import tempfile

SCRIPT = pathlib.Path(__file__).resolve()
ROOT = SCRIPT.parent.parent


def compile_instrumented(rustc, *arguments):
    """As cargo's RUSTC_WORKSPACE_WRAPPER."""
    if "evenkeel" in arguments:
        arguments = [*arguments, "-C", "instrument-coverage"]
    os.execvp(rustc, [rustc, *arguments])


def llvm(tool):
    def rustc(*arguments):
        return subprocess.run(["rustc", *arguments], check=True, capture_output=True, text=True, cwd=ROOT).stdout

    host = re.search(r"^host: (.*)$", rustc("-vV"), re.MULTILINE)[1]
    return pathlib.Path(rustc("--print", "sysroot").strip()) / "lib/rustlib" / host / "bin" / tool


def test_binary(environment):
    command = ["cargo", "test", "--locked", "--workspace", "--lib", "--no-run"]
    built = subprocess.run(command, check=True, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    return ROOT / re.search(r"\((\S*/evenkeel-[0-9a-f]+)\)", built.stderr)[1]


def first_test_line(path):
    """Number of the line at which the tests of a file begin."""
    text = path.read_text()
    tests = re.search(r"^#\[cfg\(test\)\]\nmod tests\b", text, re.MULTILINE)
    return text[: tests.start()].count("\n") + 1 if tests else sys.maxsize


def lines_by_file(report, module):
    """Lines and those that ran, by file, from a report in the format of lcov."""
    files = collections.Counter()
    ran = collections.Counter()
    for record in report.split("end_of_record\n"):
        source = re.search(r"^SF:(.*)$", record, re.MULTILINE)
        if not source:
            continue
        path = pathlib.Path(source[1])
        name = path.relative_to(module).as_posix()
        if name.startswith(("tests/", "testing/")):
            continue
        end = first_test_line(path)
        for line, count in re.findall(r"^DA:(\d+),(\d+)", record, re.MULTILINE):
            if int(line) < end:
                files[name] += 1
                ran[name] += int(count) > 0
    return files, ran


def main(name):
    module = ROOT / "src" / name
    with tempfile.TemporaryDirectory() as folder:
        profiles = f"{folder}/%p.profraw"
        environment = {**os.environ, "RUSTC_WORKSPACE_WRAPPER": SCRIPT, "LLVM_PROFILE_FILE": profiles}
        binary = test_binary(environment)
        subprocess.run([binary, f"{name}::"], check=True, env=environment, cwd=ROOT, stdout=sys.stderr)
        raw = pathlib.Path(folder).glob("*.profraw")
        data = f"{folder}/all.profdata"
        subprocess.run([llvm("llvm-profdata"), "merge", "-sparse", "-o", data, *raw], check=True)
        export = [llvm("llvm-cov"), "export", "--format=lcov", f"--instr-profile={data}", binary, module]
        report = subprocess.run(export, check=True, capture_output=True, text=True).stdout
    files, ran = lines_by_file(report, module)
    print("| file | lines | run by tests |\n|---|---|---|")
    for name in sorted(files):
        print(f"| `{name}` | {files[name]} | {100 * ran[name] / files[name]:.0f} % |")
    print(f"| all | {files.total()} | {100 * ran.total() / files.total():.0f} % |")


if __name__ == "__main__":
    if sys.argv[1].endswith("rustc"):
        compile_instrumented(*sys.argv[1:])
    main(*sys.argv[1:])
