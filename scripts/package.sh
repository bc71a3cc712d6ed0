#!/usr/bin/env bash
# Builds a wheel and an archive of the program, with man pages, completions and schemas, into dist/.
#
#   scripts/package.sh                            for this processor, on any Linux with glibc 2.17 (manylinux2014)
#   scripts/package.sh aarch64-unknown-linux-gnu  for another one (rustup target add aarch64-unknown-linux-gnu)
#   PROFILE=dev OUT=DIR scripts/package.sh        the program of the tests, for this machine only
#
# Needs Python. Installs maturin into target/packaging.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${OUT:-dist}") profile=${PROFILE:-release} data=target/package/wheel/data
python=$(realpath -s "${PACKAGING_PYTHON:-target/packaging/bin/python}")
[ -n "${PACKAGING_PYTHON:-}" ] || scripts/virtualenv.sh target/packaging packaging/requirements.txt

# maturin reads the pyproject.toml of its working directory, and finds zig by the first python3 of the path.
build=(env -C packaging PATH="$(dirname "$python"):$PATH" "$python" -m maturin build --quiet --profile "$profile")
if [ "$profile" = release ]; then
  target=${1:-$(rustc -vV | sed -n 's/^host: //p')}
  # zig links with the C library of manylinux2014, and for other processors.
  "$python" -m pip install --quiet ziglang==0.17.1
  # With its symbols, which name the functions in the stacks of a rank that makes no progress.
  build+=(--zig --compatibility manylinux2014 --target "$target")
  program=target/$target/release/evenkeel
else
  build+=(--compatibility linux)
  target=$(rustc -vV | sed -n 's/^host: //p')
  program=target/debug/evenkeel
fi

# The files beside the program. They do not depend on the processor, so any program of this revision writes them.
rm -rf target/package
mkdir -p "$data" "$out"
writer=("$program")
if [ "$profile" = release ]; then
  # The program first: it writes the files that the wheel has beside it.
  "${build[@]}" --out "$PWD/target/package/first"
fi
# One for another processor does not run here.
[[ $target == "$(uname -m)"-* ]] || writer=(cargo run --quiet --locked --)
share=$data/share
mkdir -p "$share"/{evenkeel,bash-completion/completions,zsh/site-functions,fish/vendor_completions.d,doc/evenkeel}
"${writer[@]}" man "$share/man/man1"
"${writer[@]}" completions bash >"$share/bash-completion/completions/evenkeel"
"${writer[@]}" completions zsh >"$share/zsh/site-functions/_evenkeel"
"${writer[@]}" completions fish >"$share/fish/vendor_completions.d/evenkeel.fish"
for kind in recipe trainingjob; do "${writer[@]}" schema "$kind" >"$share/evenkeel/$kind.schema.json"; done
cp LICENSE README.md CHANGELOG.md "$share/doc/evenkeel/"
"${build[@]}" --out "$out"

# The archive has the same files: unpack it anywhere, its bin/ belongs on the path.
version=$("${writer[@]}" --version | cut -d ' ' -f 2)
name=evenkeel-$version-${target%%-*}-linux
mkdir -p "target/package/$name/bin"
cp -r "$share" "target/package/$name/"
cp "$program" "target/package/$name/bin/"
tar -C target/package --owner=0 --group=0 --numeric-owner --sort=name -czf "$out/$name.tar.gz" "$name"
rm -rf "target/package/$name"
du -h "$out"/evenkeel_launcher-"$version"-*.whl "$out/$name.tar.gz"
