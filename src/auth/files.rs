//! Files that hold secrets or what is built on them: read within a bound, and
//! their modes looked at.

use std::{fs::File, io::Read as _, os::unix::fs::PermissionsExt as _, path::Path};

/// Of one file, in bytes.
const MAX_BYTES: u64 = 4 << 20;

/// What a file holds.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    /// Everybody on this machine may read it.
    pub(super) open: bool,
}

impl Content {
    /// Of a file that there is none of.
    pub(super) fn none() -> Self {
        Self {
            bytes: Vec::new(),
            open: false,
        }
    }
}

/// Says in the log that a secret is open to everybody. No more than that: Kubernetes
/// mounts its Secrets so unless told otherwise, in a container where there is nobody
/// else.
pub(super) fn should_be_secret(path: &Path) {
    tracing::warn!(
        file = %path.display(),
        "everybody on this machine may read this secret: chmod o-r, or defaultMode 0440 in \
         Kubernetes"
    );
}

/// The whole file. Refused where everybody may change it: whoever can decides who
/// may call.
///
/// # Errors
/// In one sentence, with the file's name and never its content.
pub(super) fn read(path: &Path) -> Result<Content, String> {
    let fault = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
    // To open a pipe would wait for somebody to write to it.
    if !std::fs::metadata(path).map_err(|e| fault(&e))?.is_file() {
        return Err(fault(&"is no file"));
    }
    let file = File::open(path).map_err(|e| fault(&e))?;
    let metadata = file.metadata().map_err(|e| fault(&e))?;
    if metadata.permissions().mode() & 0o002 != 0 {
        return Err(fault(&"everybody may change it: chmod o-w"));
    }
    let mut bytes = Vec::new();
    let read = file.take(MAX_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|e| fault(&e))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(fault(&format_args!("has more than {MAX_BYTES} bytes")));
    }
    let open = metadata.permissions().mode() & 0o004 != 0;
    Ok(Content { bytes, open })
}

#[cfg(test)]
mod tests {
    use std::{fs::Permissions, path::PathBuf};

    use super::*;

    fn file(mode: u32) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, "content").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        (dir, path)
    }

    #[test]
    fn a_file_that_everybody_may_change_is_refused() {
        for mode in [0o602, 0o666, 0o646] {
            let (_dir, path) = file(mode);
            let fault = read(&path).unwrap_err();
            assert!(fault.contains("chmod o-w") && !fault.contains("content"));
        }
        for (mode, open) in [(0o600, false), (0o440, false), (0o644, true)] {
            let (_dir, path) = file(mode);
            let content = read(&path).unwrap();
            assert_eq!(content.bytes, b"content");
            assert_eq!(content.open, open, "{mode:o}");
        }
    }

    #[test]
    fn what_is_no_file_or_too_large_is_refused() {
        let (dir, path) = file(0o600);
        assert!(read(dir.path()).unwrap_err().contains("is no file"));
        assert!(read(&dir.path().join("none")).is_err());
        let larger = usize::try_from(MAX_BYTES).unwrap() + 1;
        std::fs::write(&path, vec![b' '; larger]).unwrap();
        assert!(read(&path).unwrap_err().contains("more than"));
    }
}
