#!/usr/bin/env bash
# Writes deploy/locks/*.txt: what the images install, every file by its hash. Run it after a change of pyproject.toml or
# constraints.txt. Versions are those of constraints.txt; packages that it does not name get the newest. Every image can
# trace (--otlp-traces-endpoint), which takes a megabyte.
#
# usage: deploy/lock.sh                             (make locks)
#   TORCH_INDEX_URL=URL   where the CPU builds of torch are; default: PyTorch's own index
#   TORCH_WHEELS=FOLDER   a folder that holds them, in place of the index: only what lies there gets a hash
# Needs Python with its venv module, and the package index.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check uv==0.13.9
# To build Octavo itself without an isolated build environment, whose packages would have no hashes.
sed --quiet 's/^requires = \["\(setuptools[^"]*\)"\].*/\1/p' pyproject.toml >"$work/build.in"
[ -s "$work/build.in" ] || { echo "pyproject.toml does not say which setuptools builds it" >&2; exit 1; }
torch=$(sed --quiet 's/^torch==//p' constraints.txt)

# lock NAME EXTRA,... CONSTRAINTS OPTION...
lock() {
  local name=$1 constraints=$3 extras extra
  extras=()
  for extra in ${2//,/ }; do extras+=(--extra "$extra"); done
  shift 3
  {
    echo "# Written by deploy/lock.sh: what the image of deploy/locks/$name.txt installs, and nothing else."
    "$work/venv/bin/uv" pip compile --quiet pyproject.toml "$work/build.in" "${extras[@]}" --constraint "$constraints" \
      --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links --allow-unsafe \
      --python-version 3.11 --python-platform x86_64-manylinux_2_28 "$@"
  } >"$work/$name.txt"
  mv "$work/$name.txt" "deploy/locks/$name.txt"
  echo "deploy/locks/$name.txt: $(grep --count '==' "deploy/locks/$name.txt") packages"
}

# A version with a local part, so that no index can put another build of the same number in its place.
sed "s/^torch==.*/torch==$torch+cpu/" constraints.txt >"$work/cpu.txt"
if [ -n "${TORCH_WHEELS:-}" ]; then
  from=(--find-links "$TORCH_WHEELS")
else
  from=(--extra-index-url "${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}" --index-strategy unsafe-best-match)
fi
mkdir -p deploy/locks
lock scheduler scheduler,jwt,tracing constraints.txt
lock gateway gateway,tracing constraints.txt
lock worker worker,tracing "$work/cpu.txt" "${from[@]}"
lock worker-cuda worker,tracing constraints.txt
