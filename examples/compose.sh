#!/usr/bin/env bash
# A scheduler and workers in containers, one question, and down again: bash examples/compose.sh [WORKERS]
# The first start builds the images and fetches the model. MODEL, PORT and the other variables of compose.yaml hold.
set -euo pipefail

workers=${1:-2}
cd "$(dirname "$0")/.."
PATH=$PATH:$PWD/.venv/bin
trap 'docker compose down' EXIT

docker compose up --build --detach --wait --scale worker="$workers"
octavo generate "The sea is" --address "127.0.0.1:${PORT:-50051}" --max-tokens 32 --stats
docker compose ps
