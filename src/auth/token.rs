//! Tokens: 256 bits of the system's randomness. Only their SHA-256 is kept, and
//! that needs no salt and no slow hash because nobody can guess what it hides:
//! whatever is short enough to be somebody's word is refused.

use std::{
    fmt,
    hash::{Hash, Hasher},
    str::FromStr,
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use sha2::{Digest, Sha256};

/// What tokens of `berth token` begin with, so that scanners of repositories find
/// those that got there.
const PREFIX: &str = "berth_";
/// Shorter ones are refused, in bytes.
pub const MIN_LEN: usize = 32;
/// Longer ones are refused, in bytes.
pub const MAX_LEN: usize = 512;

/// A token. Never shown but by [`Token::expose`].
#[derive(Clone)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Why a text is no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoToken {
    /// Could be guessed.
    #[error("it has less than {MIN_LEN} characters")]
    TooShort,
    /// Is something else.
    #[error("it has more than {MAX_LEN} characters")]
    TooLong,
    /// Cannot be sent.
    #[error("it has characters that are not visible ASCII")]
    Characters,
}

impl Token {
    /// A new one.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub fn mint() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes)?;
        Ok(Self(format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))))
    }

    /// One that somebody shows; blanks and line ends around it are not its own.
    ///
    /// # Errors
    /// Why it is none.
    pub fn parse(text: &str) -> Result<Self, NoToken> {
        let text = text.trim_matches([' ', '\t', '\r', '\n']);
        if text.len() < MIN_LEN {
            return Err(NoToken::TooShort);
        }
        if text.len() > MAX_LEN {
            return Err(NoToken::TooLong);
        }
        if !text.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(NoToken::Characters);
        }
        Ok(Self(text.to_owned()))
    }

    /// What is kept of it.
    pub fn hash(&self) -> TokenHash {
        TokenHash(Sha256::digest(self.0.as_bytes()).into())
    }

    /// The token itself: for the header, and for whoever minted it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

/// SHA-256 of a token. Two are compared in constant time.
#[derive(Clone, Copy)]
pub struct TokenHash([u8; 32]);

impl PartialEq for TokenHash {
    fn eq(&self, other: &Self) -> bool {
        let differs = self.0.iter().zip(&other.0).fold(0, |d, (a, b)| d | (a ^ b));
        std::hint::black_box(differs) == 0
    }
}

impl Eq for TokenHash {}

impl Hash for TokenHash {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(&self.0[..8]);
    }
}

impl fmt::Display for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenHash(..)")
    }
}

impl FromStr for TokenHash {
    type Err = ();

    /// 64 hexadecimal digits.
    fn from_str(text: &str) -> Result<Self, ()> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(());
        }
        let mut hash = [0; 32];
        for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
            let [high, low] = pair else { return Err(()) };
            *byte = (digit(*high)? << 4) | digit(*low)?;
        }
        Ok(Self(hash))
    }
}

fn digit(byte: u8) -> Result<u8, ()> {
    match byte {
        b'0'..=b'9' => Ok(byte - b'0'),
        b'a'..=b'f' => Ok(byte - b'a' + 10),
        b'A'..=b'F' => Ok(byte - b'A' + 10),
        _ => Err(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_known_by_its_hash_and_shows_nothing() {
        let (a, b) = (Token::mint().unwrap(), Token::mint().unwrap());
        assert_ne!(a.expose(), b.expose());
        assert!(a.expose().starts_with(PREFIX) && a.expose().len() == 49);
        assert!(a.hash() == Token::parse(a.expose()).unwrap().hash());
        assert!(a.hash() != b.hash());
        let written = a.hash().to_string();
        assert!(written.parse::<TokenHash>().unwrap() == a.hash());
        assert!(written.to_uppercase().parse::<TokenHash>().unwrap() == a.hash());
        let shown = format!("{a:?} {:?}", a.hash());
        assert!(!shown.contains(&a.expose()[6..12]) && !shown.contains(&written[..6]));
    }

    #[test]
    fn the_hash_is_what_other_tools_make() {
        // printf %s abcdefghijklmnopqrstuvwxyz012345 | sha256sum
        let token = Token::parse("abcdefghijklmnopqrstuvwxyz012345\n").unwrap();
        let sum = Sha256::digest(b"abcdefghijklmnopqrstuvwxyz012345");
        let hex: String = sum.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(token.hash().to_string(), hex);
    }

    #[test]
    fn what_could_be_guessed_or_not_be_sent_is_refused() {
        let parse = |text: &str| Token::parse(text).err();
        assert_eq!(parse("secret"), Some(NoToken::TooShort));
        assert_eq!(parse(&"x".repeat(31)), Some(NoToken::TooShort));
        assert_eq!(parse(&"x".repeat(32)), None);
        assert_eq!(parse(&"x".repeat(513)), Some(NoToken::TooLong));
        assert_eq!(
            parse(&format!("{} {}", "x".repeat(20), "y".repeat(20))),
            Some(NoToken::Characters)
        );
        for bad in ["", "12", &"g".repeat(64), &"a".repeat(63)] {
            assert!(bad.parse::<TokenHash>().is_err());
        }
    }
}
