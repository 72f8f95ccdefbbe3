//! Values for statements, and rows of results.

use std::borrow::Cow;

use crate::database::error::StoreError;
use crate::types::attempt::{PostProcessState, State};
use crate::types::capacity::Capacity;
use crate::types::manifest::{ContentHash, OutputPath};

/// A value for a statement. NULL has a type as well, because PostgreSQL does not infer the type of an untyped NULL
/// here.
#[derive(Clone, Debug)]
pub(crate) enum SqlValue<'a> {
    Int(Option<i64>),
    Text(Option<Cow<'a, str>>),
    Bytes(Option<Cow<'a, [u8]>>),
    Json(Option<Cow<'a, str>>),
    Bool(Option<bool>),
}

impl<'a> SqlValue<'a> {
    pub fn text(text: &'a str) -> SqlValue<'a> {
        SqlValue::Text(Some(Cow::Borrowed(text)))
    }

    pub fn maybe_text(text: Option<&'a str>) -> SqlValue<'a> {
        SqlValue::Text(text.map(Cow::Borrowed))
    }

    pub fn int(value: impl Into<i64>) -> SqlValue<'a> {
        SqlValue::Int(Some(value.into()))
    }

    /// A size or count. Values beyond the databases' integers become the largest integer.
    pub fn count(value: u64) -> SqlValue<'a> {
        SqlValue::Int(Some(i64::try_from(value).unwrap_or(i64::MAX)))
    }

    pub fn maybe_count(value: Option<u64>) -> SqlValue<'a> {
        value.map_or(SqlValue::Int(None), SqlValue::count)
    }

    pub fn bytes(bytes: &'a [u8]) -> SqlValue<'a> {
        SqlValue::Bytes(Some(Cow::Borrowed(bytes)))
    }

    pub fn json(text: Option<&'a str>) -> SqlValue<'a> {
        SqlValue::Json(text.map(Cow::Borrowed))
    }

    pub fn bool(value: bool) -> SqlValue<'a> {
        SqlValue::Bool(Some(value))
    }

    /// Roughly how much memory the value holds.
    pub fn size(&self) -> usize {
        match self {
            SqlValue::Text(Some(text)) | SqlValue::Json(Some(text)) => text.len(),
            SqlValue::Bytes(Some(bytes)) => bytes.len(),
            _ => size_of::<SqlValue>(),
        }
    }
}

macro_rules! value_from {
    ($($type:ty: $make:expr;)+) => {$(
        impl<'a> From<$type> for SqlValue<'a> {
            fn from(value: $type) -> SqlValue<'a> {
                $make(value)
            }
        }
    )+};
}

value_from! {
    &'a str: SqlValue::text;
    &'a String: SqlValue::text;
    Option<&'a str>: SqlValue::maybe_text;
    i64: SqlValue::int;
    u32: SqlValue::int;
    Option<i64>: SqlValue::Int;
    u64: SqlValue::count;
    Option<u64>: SqlValue::maybe_count;
    bool: SqlValue::bool;
    &'a [u8]: SqlValue::bytes;
    &'a Vec<u8>: SqlValue::bytes;
}

/// The values of a statement, each converted by `From`.
macro_rules! values {
    ($($value:expr),+ $(,)?) => {
        [$($crate::database::value::SqlValue::from($value)),+]
    };
}
pub(crate) use values;

/// Escapes NUL. PostgreSQL refuses NUL in text, and tools that read SQLite may stop at one. Every text passes through
/// this function.
pub(crate) fn without_nul<'a>(text: &'a str) -> Cow<'a, str> {
    match text.contains('\0') {
        true => Cow::Owned(text.replace('\0', "\\x00")),
        false => Cow::Borrowed(text),
    }
}

/// A value from a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cell {
    Null,
    Int(i64),
    Text(String),
    Bytes(Vec<u8>),
    Json(String),
    Bool(bool),
}

impl Cell {
    /// The value as text, for a message.
    pub fn into_text(self) -> String {
        match self {
            Cell::Null => String::new(),
            Cell::Int(value) => value.to_string(),
            Cell::Bool(value) => value.to_string(),
            Cell::Text(text) | Cell::Json(text) => text,
            Cell::Bytes(bytes) => format!("{} bytes", bytes.len()),
        }
    }
}

/// One row. Its columns are read from left to right.
#[derive(Debug)]
pub(crate) struct Row {
    cells: std::vec::IntoIter<Cell>,
}

macro_rules! column_reader {
    ($name:ident, $maybe:ident, $type:ty, $($pattern:pat => $made:expr),+) => {
        /// Reads the next column, which may be NULL.
        pub fn $maybe(&mut self, what: &'static str) -> Result<Option<$type>, StoreError> {
            match self.cells.next() {
                Some(Cell::Null) => Ok(None),
                $(Some($pattern) => Ok(Some($made)),)+
                _ => Err(StoreError::BadValue { what }),
            }
        }

        /// Reads the next column, which is never NULL.
        pub fn $name(&mut self, what: &'static str) -> Result<$type, StoreError> {
            self.$maybe(what)?.ok_or(StoreError::BadValue { what })
        }
    };
}

impl Row {
    pub fn new(cells: Vec<Cell>) -> Row {
        let cells = cells.into_iter();
        Row { cells }
    }

    column_reader!(int, maybe_int, i64, Cell::Int(v) => v);
    // SQLite stores JSON as text.
    column_reader!(text, maybe_text, String, Cell::Text(v) => v, Cell::Json(v) => v);
    column_reader!(bytes, maybe_bytes, Vec<u8>, Cell::Bytes(v) => v);
    column_reader!(bool, maybe_bool, bool, Cell::Bool(v) => v, Cell::Int(v) => v != 0);

    /// Reads a size or count. Fumehood never writes a negative one.
    pub fn maybe_count(&mut self, what: &'static str) -> Result<Option<u64>, StoreError> {
        let value = self.maybe_int(what)?;
        let count = value.map(|v| u64::try_from(v).map_err(|_| StoreError::BadValue { what }));
        count.transpose()
    }

    pub fn count(&mut self, what: &'static str) -> Result<u64, StoreError> {
        self.maybe_count(what)?.ok_or(StoreError::BadValue { what })
    }

    pub fn attempt(&mut self) -> Result<u32, StoreError> {
        let what = "an attempt number";
        u32::try_from(self.int(what)?).map_err(|_| StoreError::BadValue { what })
    }

    /// Reads a number that fits 32 bits.
    pub fn small(&mut self, what: &'static str) -> Result<u32, StoreError> {
        u32::try_from(self.int(what)?).map_err(|_| StoreError::BadValue { what })
    }

    pub fn state(&mut self) -> Result<State, StoreError> {
        let what = "a state";
        State::parse(&self.text(what)?).ok_or(StoreError::BadValue { what })
    }

    /// Reads as many columns as `T` has.
    pub fn read<T: FromRow>(&mut self, what: &'static str) -> Result<T, StoreError> {
        T::from_row(self, what)
    }

    pub fn cells(self) -> impl Iterator<Item = Cell> {
        self.cells
    }
}

/// A value that the next columns of a row hold.
pub(crate) trait FromRow: Sized {
    fn from_row(row: &mut Row, what: &'static str) -> Result<Self, StoreError>;
}

macro_rules! column {
    ($($type:ty: $read:ident;)+) => {$(
        impl FromRow for $type {
            fn from_row(row: &mut Row, what: &'static str) -> Result<$type, StoreError> {
                row.$read(what)
            }
        }
    )+};
}

column! {
    i64: int;
    Option<i64>: maybe_int;
    u32: small;
    u64: count;
    Option<u64>: maybe_count;
    String: text;
    Option<String>: maybe_text;
    Vec<u8>: bytes;
    bool: bool;
}

impl FromRow for State {
    fn from_row(row: &mut Row, _what: &'static str) -> Result<State, StoreError> {
        row.state()
    }
}

impl FromRow for OutputPath {
    fn from_row(row: &mut Row, what: &'static str) -> Result<OutputPath, StoreError> {
        // Another program may have written the row. Its path must not lead out of a directory either.
        OutputPath::new(row.bytes(what)?).map_err(|_| StoreError::BadValue { what })
    }
}

impl FromRow for PostProcessState {
    fn from_row(row: &mut Row, what: &'static str) -> Result<PostProcessState, StoreError> {
        Ok(PostProcessState::parse(row.maybe_text(what)?.as_deref()))
    }
}

impl FromRow for ContentHash {
    fn from_row(row: &mut Row, what: &'static str) -> Result<ContentHash, StoreError> {
        parse_hash(&row.text(what)?)
    }
}

impl FromRow for Option<ContentHash> {
    fn from_row(row: &mut Row, what: &'static str) -> Result<Option<ContentHash>, StoreError> {
        let text = row.maybe_text(what)?;
        text.map(|text| parse_hash(&text)).transpose()
    }
}

pub(crate) fn parse_hash(text: &str) -> Result<ContentHash, StoreError> {
    ContentHash::parse(text).map_err(|_| StoreError::BadValue { what: "a hash" })
}

/// Implements [`FromRow`] for a struct whose fields are the columns of a query, in the order given.
macro_rules! from_row {
    ($type:ident: $($field:ident),+) => {
        impl $crate::database::value::FromRow for $type {
            fn from_row(
                row: &mut $crate::database::value::Row,
                what: &'static str,
            ) -> Result<$type, $crate::database::error::StoreError> {
                Ok($type { $($field: from_row!(@ $field row what)),+ })
            }
        }
    };
    (@ attempt $row:ident $what:ident) => { $row.attempt()? };
    (@ $field:ident $row:ident $what:ident) => { $row.read($what)? };
}
pub(crate) use from_row;

from_row!(Capacity: memory_bytes, cpu_milli);

/// Rows and the names of their columns, which the export needs.
pub(crate) struct RowSet {
    pub columns: Vec<String>,
    pub rows: Vec<Row>,
}

/// Reads rows and skips those that Fumehood would not write, so that one bad row does not hide the others.
pub(crate) fn readable<T>(rows: Vec<Row>, read: impl Fn(Row) -> Result<T, StoreError>) -> Vec<T> {
    rows.into_iter().filter_map(|row| read(row).ok()).collect()
}
