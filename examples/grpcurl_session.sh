#!/usr/bin/env bash
# What a plain client sees of `octavo serve`: bash examples/grpcurl_session.sh [ADDRESS]
# grpcurl is taken from the path, or from .venv/bin, where `make setup` puts it.
set -euo pipefail

address=${1:-127.0.0.1:50051}
PATH=$PATH:$(dirname "$0")/../.venv/bin

call() {
  echo "> $*"
  grpcurl -plaintext "$@" || return
  echo
}

call "$address" list
call "$address" describe octavo.v1.Inference.Generate
call "$address" octavo.v1.Inference/GetModelInfo
call -d '{"prompt": "The sea is"}' "$address" octavo.v1.Inference/Tokenize
# Deltas as they are made, then usage and timings.
call -d '{"prompt": "The sea is", "sampling_params": {"max_tokens": 8, "seed": 7}}' "$address" octavo.v1.Inference/Generate
# One message at the end.
call -d '{"prompt": "The sea is", "stream": false, "sampling_params": {"max_tokens": 8, "temperature": 0}}' \
  "$address" octavo.v1.Inference/Generate
# A refusal names the field, its value and what is accepted.
echo "a temperature of 9:"
if call -d '{"prompt": "The sea is", "sampling_params": {"temperature": 9}}' "$address" octavo.v1.Inference/Generate 2>&1
then
  echo "it was accepted" >&2
  exit 1
fi
call "$address" octavo.v1.Control/GetLoad
call -d '{"service": "octavo.v1.Inference"}' "$address" grpc.health.v1.Health/Check
