//! Arrays as numpy saves them, as far as routed experts need it: C order and
//! integers. What says something else than it holds is refused.

use bytes::Bytes;

use crate::call::RoutedExperts;

/// Dimensions of an array at most.
const MAX_DIMENSIONS: usize = 8;

/// The array in a `.npy` file, `None` where it is none of a known form.
pub(super) fn parse(file: Vec<u8>) -> Option<RoutedExperts> {
    let rest = file.strip_prefix(b"\x93NUMPY")?;
    let (&[major, _], rest) = rest.split_first_chunk()?;
    let (header_len, rest) = match major {
        1 => {
            let (len, rest) = rest.split_first_chunk()?;
            (usize::from(u16::from_le_bytes(*len)), rest)
        }
        2 | 3 => {
            let (len, rest) = rest.split_first_chunk()?;
            (usize::try_from(u32::from_le_bytes(*len)).ok()?, rest)
        }
        _ => return None,
    };
    let header = std::str::from_utf8(rest.get(..header_len)?).ok()?;
    let (dtype, width) = dtype(value(header, "descr")?)?;
    if !value(header, "fortran_order")?.starts_with("False") {
        return None;
    }
    let shape = shape(value(header, "shape")?)?;
    let numbers = shape
        .iter()
        .try_fold(1_usize, |n, &d| n.checked_mul(usize::try_from(d).ok()?))?;
    let begin = file.len() - rest.len() + header_len;
    if file.len() - begin != numbers.checked_mul(width)? {
        return None;
    }
    Some(RoutedExperts {
        data: Bytes::from(file).slice(begin..),
        dtype: dtype.into(),
        shape,
    })
}

/// What stands after a key of the header, which is a Python dictionary.
fn value<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = header.split_once(&format!("'{key}':"))?;
    Some(rest.trim_start())
}

/// Numpy's name for a type, and its bytes.
fn dtype(descr: &str) -> Option<(&'static str, usize)> {
    let known = [
        ("'|u1'", "uint8", 1),
        ("'|i1'", "int8", 1),
        ("'<u2'", "uint16", 2),
        ("'<i2'", "int16", 2),
        ("'<u4'", "uint32", 4),
        ("'<i4'", "int32", 4),
        ("'<i8'", "int64", 8),
    ];
    known
        .into_iter()
        .find(|(code, ..)| descr.starts_with(code))
        .map(|(_, name, width)| (name, width))
}

fn shape(tuple: &str) -> Option<Vec<u32>> {
    let (inside, _) = tuple.strip_prefix('(')?.split_once(')')?;
    let shape: Vec<u32> = inside
        .split(',')
        .map(str::trim)
        .filter(|d| !d.is_empty())
        .map(|d| d.parse().ok())
        .collect::<Option<_>>()?;
    (shape.len() <= MAX_DIMENSIONS).then_some(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(descr: &str, order: &str, shape: &str, data: &[u8]) -> Vec<u8> {
        let header =
            format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n");
        let mut file = b"\x93NUMPY\x01\x00".to_vec();
        file.extend_from_slice(&u16::try_from(header.len()).unwrap().to_le_bytes());
        file.extend_from_slice(header.as_bytes());
        file.extend_from_slice(data);
        file
    }

    #[test]
    fn an_array_has_its_type_and_shape() {
        let array = parse(saved("<i2", "False", "(2, 1, 3)", &[7; 12])).unwrap();
        assert_eq!(
            (array.dtype.as_str(), &*array.shape),
            ("int16", &[2, 1, 3][..])
        );
        assert_eq!(&array.data[..], [7; 12]);
        let row = parse(saved("|u1", "False", "(4,)", &[1, 2, 3, 4])).unwrap();
        assert_eq!(row.shape, [4]);
    }

    #[test]
    fn what_does_not_hold_what_it_says_is_refused() {
        for (descr, order, shape, data) in [
            ("<i4", "False", "(2, 2)", &[0; 15][..]),
            ("<i4", "True", "(2, 2)", &[0; 16]),
            ("<f4", "False", "(2, 2)", &[0; 16]),
            ("<i4", "False", "(4294967295, 4294967295, 4294967295)", &[]),
            ("<i4", "False", "(-1,)", &[]),
            ("<i4", "False", "(1,1,1,1,1,1,1,1,1)", &[0; 4]),
        ] {
            assert_eq!(parse(saved(descr, order, shape, data)), None, "{shape}");
        }
        for len in 0..60 {
            let mut cut = saved("<i4", "False", "(1,)", &[0; 4]);
            cut.truncate(len);
            assert_eq!(parse(cut), None);
        }
    }
}
