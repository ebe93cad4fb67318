#!/bin/sh
# Installs the Debian packages named on the command line that are missing, where this user may; says which first, and
# what is missing where not. Never fails: what needs a package tells so by itself.
# SYSTEM_PACKAGES=no: none is installed.
set -u

missing=""
for package in "$@"; do
  dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "${SYSTEM_PACKAGES:-yes}" = no ]; then
  echo "Left out, as SYSTEM_PACKAGES=no says:$missing" >&2
  exit 0
fi
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
echo "Installing Debian packages, which SYSTEM_PACKAGES=no leaves out:$missing"
$root apt-get update -qq >/dev/null
# One at a time: apt-get installs none of several where it knows one of them not.
for package in $missing; do
  $root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$package" >/dev/null ||
    echo "apt-get could not install $package; what needs it says so" >&2
done
