//! Finding a text, and a row of token ids, in whatever form they may have leaked.

use base64::Engine as _;

/// What must be found nowhere.
pub struct Needles {
    texts: Vec<String>,
    /// Rows of ids, as "1 2 3".
    rows: Vec<String>,
}

impl Needles {
    /// This text: as it is, in base64 wherever it may begin in three bytes, in
    /// hexadecimal digits, as bytes in a row of numbers, and percent-encoded.
    pub fn of_text(text: &str) -> Self {
        let mut texts = vec![text.to_lowercase()];
        let alphabets = [
            base64::engine::general_purpose::STANDARD_NO_PAD,
            base64::engine::general_purpose::URL_SAFE_NO_PAD,
        ];
        for alphabet in alphabets {
            for before in 0..3 {
                let mut bytes = vec![0; before];
                bytes.extend_from_slice(text.as_bytes());
                // The first and the last letters depend on what stands around.
                bytes.truncate(bytes.len() / 3 * 3);
                let encoded = alphabet.encode(&bytes);
                let begins = if before == 0 { 0 } else { 4 };
                texts.push(encoded[begins..].to_lowercase());
            }
        }
        texts.push(text.bytes().map(|b| format!("{b:02x}")).collect());
        texts.push(text.bytes().map(|b| format!("%{b:02x}")).collect());
        let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
        Self {
            texts,
            rows: vec![row(&bytes)],
        }
    }

    /// And this row of ids: as numbers with whatever stands between them, and as
    /// little-endian bytes in base64 and in digits.
    pub fn and_ids(mut self, ids: &[u32]) -> Self {
        self.rows.push(row(ids));
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.texts
            .push(bytes.iter().map(|b| format!("{b:02x}")).collect());
        for before in 0..3 {
            let mut around = vec![0; before];
            around.extend_from_slice(&bytes);
            around.truncate(around.len() / 3 * 3);
            let encoded = base64::engine::general_purpose::STANDARD_NO_PAD.encode(&around);
            let begins = if before == 0 { 0 } else { 4 };
            self.texts.push(encoded[begins..].to_lowercase());
        }
        let in_row: Vec<u32> = bytes.into_iter().map(u32::from).collect();
        self.rows.push(row(&in_row));
        self
    }

    /// And this text as it is.
    pub fn and_text(mut self, text: &str) -> Self {
        self.texts.push(text.to_lowercase());
        self
    }

    /// The first of them that is there, with what stands around it.
    pub fn find(&self, hay: &str) -> Option<String> {
        let lower = hay.to_lowercase();
        let numbers = format!(" {} ", numbers(hay));
        let text = self.texts.iter().find_map(|needle| {
            let at = lower.find(&**needle)?;
            let (from, to) = (at.saturating_sub(300), (at + 300).min(lower.len()));
            let around = String::from_utf8_lossy(&lower.as_bytes()[from..to]).into_owned();
            Some(format!("{needle:?} in ...{around}..."))
        });
        text.or_else(|| {
            let mut rows = self.rows.iter();
            let row = rows.find(|row| numbers.contains(&format!(" {row} ")))?;
            Some(format!("the ids {row}"))
        })
    }
}

fn row(ids: &[u32]) -> String {
    let ids: Vec<_> = ids.iter().map(u32::to_string).collect();
    ids.join(" ")
}

/// All numbers, with a space between.
fn numbers(text: &str) -> String {
    let parts = text.split(|c: char| !c.is_ascii_digit());
    let numbers: Vec<&str> = parts.filter(|part| !part.is_empty()).collect();
    numbers.join(" ")
}

#[test]
fn what_is_hidden_is_found() {
    let needles = Needles::of_text("Canary-5d1f")
        .and_ids(&[70_707, 80_808, 90_909])
        .and_text("said");
    let base64 = |bytes: &[u8]| base64::engine::general_purpose::STANDARD.encode(bytes);
    for hidden in [
        "x canary-5D1F y".to_owned(),
        base64(b"Canary-5d1f"),
        base64(b"{\"a\":\"Canary-5d1f\"}"),
        base64(b"is Canary-5d1f."),
        "43616e6172792d35643166".to_owned(),
        format!("{:?}", b"Canary-5d1f"),
        "[70707, 80808, 90909]".to_owned(),
        "70707,80808,90909".to_owned(),
        "ids: 70707\n 80808\n 90909".to_owned(),
        base64(&[0, 0x33, 0x14, 1, 0, 0xa8, 0x3b, 1, 0, 0x1d, 0x63, 1, 0]),
        format!(
            "{:?}",
            70_707_u32
                .to_le_bytes()
                .iter()
                .chain(&80_808_u32.to_le_bytes())
                .chain(&90_909_u32.to_le_bytes())
                .collect::<Vec<_>>()
        ),
        "it SAID so".to_owned(),
    ] {
        assert!(needles.find(&hidden).is_some(), "{hidden}");
    }
    for other in [
        "canary",
        "70707 80808 90910",
        "170707 80808 90909",
        "Q2FuYXJ5",
    ] {
        assert_eq!(needles.find(other), None, "{other}");
    }
}
