#!/bin/sh
# Installs the Debian packages named on the command line that are missing, where this user may; says what is missing
# where not. Never fails: what needs a package tells so by itself.
set -u

missing=""
for package in "$@"; do
  dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "This is no Debian: install what its packages$missing hold, in the way of this system." >&2
  exit 0
fi
root=""
if [ "$(id -u)" -ne 0 ]; then
  root="sudo -n"
  if ! sudo -n true 2>/dev/null; then
    echo "Not root, and sudo asks for a password. Run: sudo apt-get install$missing" >&2
    exit 0
  fi
fi
echo "Installing Debian packages:$missing"
$root apt-get update -qq >/dev/null
# shellcheck disable=SC2086 # one word a package
$root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing >/dev/null ||
  echo "apt-get could not install:$missing" >&2
