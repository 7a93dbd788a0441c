//! The frame round every stored value. A value that was changed, cut short, or
//! stands under another key than it was written for does not decode: it is
//! damage, never data.

use xxhash_rust::xxh3::xxh3_64;

/// Bytes before the body.
const HEADER: usize = 20;
/// No stored value is larger: sled keeps larger ones badly.
pub(super) const MAX_VALUE: usize = 4096;
/// The largest body.
pub(super) const MAX_BODY: usize = MAX_VALUE - HEADER;

const MAGIC: [u8; 2] = *b"bR";
const VERSION: u8 = 1;

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An event of a key's life that fits one value.
    Event = 1,
    /// A piece of a larger body.
    Chunk = 2,
    /// The starts of one replica.
    Replica = 3,
    /// A range of sequence numbers that are not in use any more.
    Gap = 4,
    /// When a key is looked at for expiry.
    Due = 5,
    /// The store's identity.
    Identity = 6,
    /// A piece of a note.
    Note = 7,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        [
            Self::Event,
            Self::Chunk,
            Self::Replica,
            Self::Gap,
            Self::Due,
            Self::Identity,
            Self::Note,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == byte)
    }
}

/// A value that is not what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a stored value is damaged")]
pub(super) struct Damaged;

/// Frames `body`, which is at most [`MAX_BODY`] bytes, for this tree key.
pub(super) fn encode(kind: Kind, key: &[u8], body: &[u8]) -> Result<Vec<u8>, Damaged> {
    if body.len() > MAX_BODY {
        return Err(Damaged);
    }
    let len = u32::try_from(body.len()).map_err(|_| Damaged)?;
    let mut value = Vec::with_capacity(HEADER + body.len());
    value.extend_from_slice(&MAGIC);
    value.push(VERSION);
    value.push(kind as u8);
    value.extend_from_slice(&len.to_le_bytes());
    value.extend_from_slice(&xxh3_64(key).to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&value), body);
    value.extend_from_slice(&crc.to_le_bytes());
    value.extend_from_slice(body);
    Ok(value)
}

/// The body of a value found under this tree key.
pub(super) fn decode<'a>(kind: Kind, key: &[u8], value: &'a [u8]) -> Result<&'a [u8], Damaged> {
    let (header, body) = value.split_at_checked(HEADER).ok_or(Damaged)?;
    let (covered, crc) = header.split_at_checked(HEADER - 4).ok_or(Damaged)?;
    let whole = covered.starts_with(&[MAGIC[0], MAGIC[1], VERSION])
        && covered.get(3).copied().and_then(Kind::from_byte) == Some(kind)
        && covered.get(4..8)
            == Some(
                u32::try_from(body.len())
                    .unwrap_or(0)
                    .to_le_bytes()
                    .as_slice(),
            )
        && covered.get(8..16) == Some(xxh3_64(key).to_le_bytes().as_slice())
        && crc == crc32c::crc32c_append(crc32c::crc32c(covered), body).to_le_bytes();
    if whole { Ok(body) } else { Err(Damaged) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_comes_back_under_its_own_key_and_kind_only() {
        let value = encode(Kind::Event, b"key", b"body").unwrap();
        assert_eq!(decode(Kind::Event, b"key", &value), Ok(&b"body"[..]));
        assert_eq!(decode(Kind::Event, b"kez", &value), Err(Damaged));
        assert_eq!(decode(Kind::Chunk, b"key", &value), Err(Damaged));
    }

    #[test]
    fn no_flipped_bit_and_no_cut_goes_unseen() {
        let value = encode(Kind::Chunk, b"key", &[7; 100]).unwrap();
        for bit in 0..value.len() * 8 {
            let mut bad = value.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(Kind::Chunk, b"key", &bad), Err(Damaged), "bit {bit}");
        }
        for len in 0..value.len() {
            assert_eq!(decode(Kind::Chunk, b"key", &value[..len]), Err(Damaged));
        }
    }

    #[test]
    fn a_value_never_exceeds_the_bound() {
        let largest = encode(Kind::Chunk, b"key", &[0; MAX_BODY]).unwrap();
        assert_eq!(largest.len(), MAX_VALUE);
        assert!(encode(Kind::Chunk, b"key", &[0; MAX_BODY + 1]).is_err());
    }
}
